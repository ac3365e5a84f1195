// The sockets of a group whose ranks do not share memory.  They replace shared pages:
//
//     control ring   liveness, departures, verdicts, progress (health/control.h)
//     mesh           data of collectives (transport/tcp/mesh.h), moved by the thread that waits
//     pump           messages (p2p/pump.h), moved by the reactor's thread
//
// The bootstrap made the control connections (bootstrap/host_links.h); all others are made when
// they are first used.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "bootstrap/host_links.h"
#include "health/control.h"
#include "health/session.h"
#include "p2p/engine.h"
#include "p2p/pump.h"
#include "transport/tcp/mesh.h"

namespace ringreduce {

class Network final : public Outside, private net::Control::Listener, private net::Pump::Listener {
 public:
  // Opens this process's port and admits the ranks of the group.  Returns the text that Hosts::meet
  // sends to them.
  // `links` have joined.
  Network(std::unique_ptr<HostLinks> links, const Hosts& hosts);
  ~Network() override;

  // The ranks, with pages in this process's own memory.
  std::vector<Seat> seats(const Hosts& hosts);
  // Starts to report news to `session`.  The ranks of the mesh are in the order of `ring`.  The
  // mesh must not outlive this object.  Call `leave` or `close` before the mesh or the session is
  // destroyed.
  std::unique_ptr<Mesh> start(Session& session);
  // The channels for messages to and from each rank.
  std::vector<Engine::Wire> channels();
  const SharedOptions& sharedOptions() const { return links_->sharedOptions(); }
  const HostRing& ring() const { return links_->ring(); }
  const WireCost& cost() const { return links_->cost(); }

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

 private:
  // ---- in the reactor's thread
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

  void route(net::Socket socket, const net::PeerHello& caller);
  std::unique_ptr<Mesh> makeMesh(Session& session);

  const std::unique_ptr<HostLinks> links_;
  const GroupOptions& options_;
  const int rank_, size_;
  std::unique_ptr<WaitGuard>
      placed_;                   // the session, for the mesh, where ranks stand in another order
  std::vector<int> places_;      // by rank; empty where that is its number
  std::vector<int> neighbours_;  // other ranks of this host

  std::unique_ptr<RankPage[]> pages_;
  std::unique_ptr<std::byte[]> own_ring_;  // for messages to oneself
  std::unique_ptr<Box> own_box_;

  const std::shared_ptr<net::Reactor> reactor_;
  Mesh* mesh_ = nullptr;
  std::atomic<Session*> session_ = nullptr;
  // Ranks that have left, or whose processes have ended; messages may still come from them.  In the
  // reactor's thread.
  std::vector<bool> over_;
  // By rank, until it is known why its connection for messages has ended; likewise.
  std::vector<net::Reactor::Timer> unexplained_;

  std::mutex leaving_;      // which several threads may want at the same time
  std::mutex calls_mutex_;  // so that neither of these goes while another thread calls it
  std::unique_ptr<net::Pump> pump_;
  net::Pump* carrier_ = nullptr;  // the same for the reactor's thread, which may call while it ends
  std::unique_ptr<net::Control> control_;
};

}  // namespace ringreduce
