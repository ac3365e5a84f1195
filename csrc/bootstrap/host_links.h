// Makes a group of ranks that share no memory: opens this process's port, connects the control ring
// through proven sockets, finds the order of the data ring, and has all ranks commit or none.
//
//     rendezvous(..., [&](const Hosts& hosts) { return links.open(hosts); })
//     links.join(hosts, store, local);                                       // collective
//     links.deliverTo(handler);   // connections that other ranks make later
//
// The control connections are made at once, all others when they are first used.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/fd.h"
#include "bootstrap/options.h"
#include "bootstrap/store.h"
#include "bootstrap/topology.h"
#include "transport/tcp/acceptor.h"
#include "transport/tcp/reactor.h"
#include "transport/tcp/socket.h"

namespace ringreduce {

class HostLinks {
 public:
  using Poll = std::function<void()>;

  explicit HostLinks(const GroupOptions& options) : options_(options) {}

  // Opens the port and admits the ranks of the group.  Returns the text for the other ranks.
  std::string open(const Hosts& hosts);

  // Connects the control ring, and calls `local` to make what the ranks of this host share; `local`
  // calls its argument while it waits for one of them, and passes on its exceptions.  Collective.
  // Throws on all ranks if it throws on any, with one exception: if a rank is interrupted or killed
  // in the last round, some ranks learn of it later, as of a process that ended.
  using LocalPoll = std::function<void(int local_rank)>;
  void join(const Hosts& hosts, Store& store, const std::function<void(const LocalPoll&)>& local);
  // After join() has thrown: its failure, for ranks that may have ended the last round, and their
  // connections.  They have the group and do not look into the store any more.
  const std::optional<GroupFailure>& failureOfLastRound() const { return failure_of_last_round_; }
  // After that, and before this process may end: all ranks that look into the store know why.
  void leave(Store& store) const;
  std::array<net::Socket*, 2> neighbours() { return {&next_, &previous_}; }

  // Makes a connection to a rank and proves it.  Waits.
  net::Socket dial(int to, net::Purpose purpose, int number, const Poll& poll) const;
  // From now on `handler` gets the connections that other ranks make, first those that are here
  // already, until close().  Called in the reactor's thread.
  using Handler = std::function<void(net::Socket, const net::PeerHello&)>;
  void deliverTo(Handler handler);
  void close() { admitted_.reset(); }

  int rank() const { return rank_; }
  int size() const { return size_; }
  const GroupOptions& options() const { return options_; }
  const SharedOptions& sharedOptions() const { return shared_; }
  // The options of the group of this host's ranks.
  static SharedOptions localOptions(const Hosts& hosts);
  const HostRing& ring() const { return host_ring_; }
  const WireCost& cost() const { return cost_; }
  bool knowsRate() const { return agreed_cost_.knowsRate(); }
  // All ranks in the order of the control ring, and its two connections; none with one rank.
  const std::vector<int>& controlRing() const { return ring_; }
  net::Socket takeNext() { return std::move(next_); }
  net::Socket takePrevious() { return std::move(previous_); }
  const std::shared_ptr<net::Reactor>& reactor() const { return reactor_; }
  // The most addresses of one rank that data is shared out to.
  size_t mostPaths() const;
  // Called before the transport is made, which takes these descriptors' places.
  void releaseDescriptors() { reserved_.clear(); }
  int connections() const { return connections_; }  // RINGREDUCE_LANES; 0: as many as help
  const std::string& congestion() const { return congestion_; }  // RINGREDUCE_CONGESTION
  Nanos lostAfter() const { return lost_after_; }                // RINGREDUCE_LOST_SECONDS

 private:
  struct Early {
    net::Socket socket;
    net::PeerHello caller;
  };

  void take(net::Socket socket, const net::PeerHello& caller);
  void readOptions(const Hosts& hosts);
  void connect(const Hosts& hosts, const Poll& poll);
  void agree(const Poll& poll);
  void reserveDescriptors();
  void compareRingSettings(const Hosts& hosts) const;
  HostRing findRing(const Hosts& hosts, Store& store, const Poll& poll);
  std::vector<double> survey(const Hosts& hosts, const Poll& poll);
  void measureWires();
  net::Socket awaitEarly(int from, net::Purpose purpose, const Poll& poll);
  void checkNext(const Poll& poll) const;
  [[noreturn]] void gaveUp(int rank, const Poll& poll, const char* how) const;
  int ringNeighbour(int step) const;
  const std::string& who(int rank) const { return who_[static_cast<size_t>(rank)]; }

  const GroupOptions options_;
  int rank_ = 0, size_ = 0;
  int ranks_on_host_ = 1;  // the most
  int connections_ = 0;
  Nanos lost_after_ = 0;
  std::string nonce_;
  net::Secret secret_{};
  SharedOptions shared_;
  std::vector<net::Endpoint> endpoints_;
  std::string congestion_;    // RINGREDUCE_CONGESTION
  std::string ring_setting_;  // RINGREDUCE_RING, as this rank has it
  HostRing host_ring_;
  AgreedWireCost agreed_cost_;  // of all measured wires
  WireCost cost_;
  std::vector<std::string> who_;
  std::vector<int> ring_;  // the control ring's order: ranks of a host beside each other

  std::shared_ptr<net::Reactor> reactor_;
  std::shared_ptr<net::Acceptor> acceptor_;
  net::Socket next_, previous_;
  int waits_for_ = 0;           // in join(): the rank that this one waits for
  bool in_last_round_ = false;  // of the token: others may have ended it
  std::optional<GroupFailure> failure_of_last_round_;
  std::vector<Fd> reserved_;

  std::mutex mutex_;         // of the next two
  std::deque<Early> early_;  // came before there was a handler
  Handler handler_;
  std::shared_ptr<void> admitted_;  // destroyed first: no connection is admitted after that
};

}  // namespace ringreduce
