// The sockets of a group whose ranks do not share memory.  They replace shared pages:
//
//     control ring   liveness, departures, failures, progress (control/control.h)
//     transport      data of collectives (transport/transport.h), moved by the thread that waits
//     forwarder      messages (p2p/message_forwarder.h), moved by the reactor's thread
//
// Between ranks of one host both go through memory, if they share it.
//
// The bootstrap made the control connections (bootstrap/host_links.h); all others are made when
// they are first used.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "bootstrap/host_links.h"
#include "bootstrap/host_memory.h"
#include "control/control.h"
#include "health/arbiter.h"
#include "health/mirror_view.h"
#include "p2p/engine.h"
#include "p2p/message_forwarder.h"
#include "transport/fabric.h"
#include "transport/neighbours.h"
#include "transport/transport.h"
#include "transport/wait_guard.h"

namespace ringreduce {

class Network final : public PeerChannel, private net::MessageForwarder::Listener {
 public:
  // `links` have joined.
  explicit Network(std::unique_ptr<HostLinks> links);
  ~Network() override;

  // The view of the ranks, to which it then reports news.  The ranks of `local_memory`, if there
  // are any, are this host's, and reach each other there.  It must live as long.
  std::unique_ptr<PeerView> view(const Hosts& hosts, const HostMemory& local_memory,
                                 const GroupOptions& options);
  // Starts to report news to the view, which is that of `arbiter`.  The ranks of the transport are
  // in the order of `ring`.  The transport must not outlive this object or the memory.  Call
  // `leave` or `close` before the transport or the arbiter is destroyed.
  std::unique_ptr<Transport> start(Arbiter& arbiter, const Hosts& hosts,
                                   const HostMemory& local_memory);
  // The channels for messages to and from each rank.
  std::vector<Engine::Channels> channels(const Hosts& hosts, const HostMemory& local_memory);
  const SharedOptions& sharedOptions() const { return links_->sharedOptions(); }
  const HostRing& ring() const { return links_->ring(); }
  const WireCost& cost() const { return links_->cost(); }
  // Whether the rate of lines was told or measured when the group was made.
  bool knowsRate() const { return links_->knowsRate(); }
  // Logs what calls have measured.
  void tellCost(const WireCost& cost) const;
  // The arbiter, by the transport's numbers of ranks, once there is a transport.
  WaitGuard& guard() const { return *guard_; }

  // Waits until the kernel has taken all messages to ranks that may still receive, up to `timeout`,
  // or until the group fails.  `poll`, if not null, is called now and then and may throw.
  void handOver(void (*poll)(), Nanos timeout);
  // Before the arbiter departs: how long its departure and leave() may wait, together.
  void leaveWithin(Nanos longest);
  // After the arbiter has departed: waits briefly until the other ranks know, and closes all
  // sockets except those of the transport.
  void leave();

  // The same without waiting.  After it returns no thread calls the arbiter or the transport.
  void close();

  // ---- PeerChannel
  void broadcastFailure(const GroupFailure& failure) override;
  void depart(Declared how) override;
  void askForProgress(uint64_t since) override;
  void wakePeer(int rank) override;
  bool mayReceiveFrom(int rank) override;
  void callLater(Nanos delay, std::function<void()> then) override;

 private:
  // ---- in the reactor's thread
  void onProgress(int rank) override;
  void broken(int rank, const std::string& how, bool damaged) override;

  int positionOf(int rank) const {
    return positions_.empty() ? rank : positions_[static_cast<size_t>(rank)];
  }

  void route(net::Socket socket, const net::PeerHello& caller);
  std::unique_ptr<Neighbours> neighbours(const Hosts& hosts, const HostMemory& local_memory) const;
  std::unique_ptr<Fabric> makeFabric(std::unique_ptr<Neighbours> neighbours) const;

  const std::unique_ptr<HostLinks> links_;
  const GroupOptions& options_;
  const int rank_, size_;
  // The arbiter, for a transport that numbers ranks by their ring positions.
  std::unique_ptr<WaitGuard> position_guard_;
  WaitGuard* guard_ = nullptr;
  std::vector<int> positions_;  // by rank; empty where that is its number

  std::vector<bool> in_memory_;  // by rank: messages do not take sockets
  std::unique_ptr<RankPage[]> pages_;
  std::unique_ptr<std::byte[]> own_ring_;  // for messages to oneself
  std::unique_ptr<Box> own_box_;

  const std::shared_ptr<net::Reactor> reactor_;
  std::unique_ptr<Fabric> fabric_;
  Transport* transport_ = nullptr;
  MirrorView* view_ = nullptr;
  std::atomic<Arbiter*> arbiter_ = nullptr;
  Nanos leave_by_ = 0;                       // once it leaves
  std::vector<net::Reactor::Timer> timers_;  // of callLater; in the reactor's thread

  std::mutex leaving_;
  std::mutex calls_mutex_;  // guards destruction of the next two against calls
  std::unique_ptr<net::MessageForwarder> forwarder_;
  // The same object.  The reactor's thread uses this pointer, because it may call while
  // `forwarder_` is being destroyed.
  net::MessageForwarder* carrier_ = nullptr;
  std::unique_ptr<net::Control> control_;
};

}  // namespace ringreduce
