// The sockets of a group whose ranks do not share memory.  They replace shared pages:
//
//     control ring   liveness, departures, verdicts, progress (health/control.h)
//     mesh           data of collectives (transport/tcp/mesh.h), moved by the thread that waits
//     pump           messages (p2p/pump.h), moved by the reactor's thread
//
// Ranks exchange endpoints when the hosts meet (bootstrap/hosts.h).  The control connections are
// made at once, all others when they are first used.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "bootstrap/host_ring.h"
#include "bootstrap/hosts.h"
#include "bootstrap/options.h"
#include "bootstrap/slowness.h"
#include "health/control.h"
#include "health/session.h"
#include "p2p/engine.h"
#include "p2p/pump.h"
#include "transport/tcp/acceptor.h"
#include "transport/tcp/mesh.h"

namespace ringreduce {

class Network final : public Outside, private net::Control::Listener, private net::Pump::Listener {
 public:
  // Opens this process's port and admits the ranks of the group.  Returns the text that Hosts::meet
  // sends to them.
  explicit Network(const GroupOptions& options) : options_(options) {}
  ~Network() override;
  std::string open(const Hosts& hosts);

  // Connects the control ring, and calls `local` to make what the ranks of this host share.  The
  // store that `local` gets throws if another rank has given up. Collective.  Throws on all ranks
  // if it throws on any.  One exception: if a rank is interrupted or killed in the last round, some
  // ranks learn of it later, as of a process that ended.
  void join(const Hosts& hosts, Store& store, const std::function<void(Store&)>& local);

  // The ranks, with pages in this process's own memory.
  std::vector<Seat> seats(const Hosts& hosts);
  // Starts to report news to `session`.  The ranks of the mesh are in the order of `ring`.  The
  // mesh must not outlive this object.  Call `leave` or `close` before the mesh or the session is
  // destroyed.
  std::unique_ptr<Mesh> start(Session& session);
  // The channels for messages to and from each rank.
  std::vector<Engine::Wire> channels();
  const SharedOptions& sharedOptions() const { return shared_; }
  const HostRing& ring() const { return host_ring_; }
  const WireCost& cost() const { return cost_; }

  // Waits until the kernel has taken all messages to ranks that may still receive, up to `timeout`,
  // or until the group fails.  `turn`, if not null, is called now and then and may throw.
  void handOver(void (*turn)(), Nanos timeout);
  // After the session has departed: waits briefly until the other ranks know, and closes all
  // sockets except those of the mesh.
  void leave();

  // The same without waiting.  After it returns no thread calls the session or the mesh.
  void close();

  // ---- Outside
  void tell(Failure kind, int culprit, const std::string& text) override;
  void depart(Departure how) override;
  void ask(uint64_t since) override;
  void stir(int rank) override;

  // The progress of GPU streams, from any thread.
  void publishProgress(const StreamProgress& own);
  // As last heard of that rank, and when (0: never).
  std::pair<StreamProgress, Nanos> progressOf(int rank);

 private:
  struct Early {
    net::Socket socket;
    net::PeerHello caller;
  };

  // ---- in the reactor's thread
  void take(net::Socket socket, const net::PeerHello& caller);
  void lost(const std::vector<int>& ranks, PeerState fate, const std::string& how) override;
  void departed(int rank, Departure how) override;
  void ended(const net::Verdict& verdict) override;
  void seen(int rank, const net::Whereabouts& there) override;
  net::Whereabouts own(uint64_t since) override;
  std::vector<int> stopped() override;
  void stirred(int rank) override;
  void broken(int rank, const std::string& how, bool damaged) override;

  void hearOut(int rank);
  int placeOf(int rank) const {
    return places_.empty() ? rank : places_[static_cast<size_t>(rank)];
  }

  net::Socket dial(int to, net::Purpose purpose, int lane, const std::function<void()>& turn) const;
  void readOptions(const Hosts& hosts);
  void connect(const Hosts& hosts, const std::function<void()>& turn);
  void agree(const std::function<void()>& turn);
  // What a rank told when the hosts met: where it is, its options, its wish for the ring.
  static std::string toldPart(const Hosts& hosts, int rank, int part);
  // network_ring.cc
  void compareWishes(const Hosts& hosts) const;
  HostRing findRing(const Hosts& hosts, Store& store, const std::function<void()>& turn);
  std::vector<double> survey(const Hosts& hosts, const std::function<void()>& turn);
  void forgetRing(Store& store) const;
  void lookAtWires();
  net::Socket awaitEarly(int from, net::Purpose purpose, const std::function<void()>& turn);
  void lookAtNext(const std::function<void()>& turn) const;
  [[noreturn]] void gaveUp(int rank, const std::function<void()>& turn) const;
  void route(net::Socket socket, const net::PeerHello& caller);
  std::unique_ptr<Mesh> makeMesh(Session& session);

  const GroupOptions options_;
  int rank_ = 0, size_ = 0;
  int ranks_on_host_ = 1;  // the most
  int lanes_ = 0;          // RINGREDUCE_LANES; 0: as many as help
  Nanos lost_after_ = 0;   // RINGREDUCE_LOST_SECONDS
  std::string word_;
  net::Secret secret_{};
  SharedOptions shared_;
  std::vector<net::Endpoint> endpoints_;
  std::string wish_;  // RINGREDUCE_RING, as this rank has it
  HostRing host_ring_;
  Slowness slowest_;  // of all wires that were looked at
  WireCost cost_;
  std::unique_ptr<WaitGuard>
      placed_;               // the session, for the mesh, where ranks stand in another order
  std::vector<int> places_;  // by rank; empty where that is its number
  std::vector<std::string> who_;
  std::vector<int> neighbours_;  // other ranks of this host
  std::vector<int> ring_;        // the control ring's order: ranks of a host beside each other

  std::unique_ptr<RankPage[]> pages_;
  std::unique_ptr<std::byte[]> own_ring_;  // for messages to oneself
  std::unique_ptr<Box> own_box_;

  std::shared_ptr<net::Reactor> reactor_;
  std::shared_ptr<net::Acceptor> acceptor_;
  net::Socket next_, previous_;  // until the control ring has them

  std::mutex mutex_;         // of the next two
  std::deque<Early> early_;  // came before there was anybody to take them
  Mesh* mesh_ = nullptr;
  std::atomic<Session*> session_ = nullptr;
  // Ranks that have left, or whose processes have ended; messages may still come from them.  In the
  // reactor's thread.
  std::vector<bool> over_;
  // By rank, until it is known why its connection for messages has ended; likewise.
  std::vector<net::Reactor::Timer> unexplained_;

  std::mutex progress_mutex_;  // of what follows, by rank
  std::vector<std::pair<StreamProgress, Nanos>> progress_;

  std::mutex leaving_;      // which several threads may want at the same time
  std::mutex calls_mutex_;  // so that neither of these goes while another thread calls it
  std::unique_ptr<net::Pump> pump_;
  net::Pump* carrier_ = nullptr;  // the same for the reactor's thread, which may call while it ends
  std::unique_ptr<net::Control> control_;
  std::shared_ptr<void> admitted_;  // the first to go: nobody is let in any more
};

}  // namespace ringreduce
