// Starts and closes the parts, routes connections, and passes on reports.
#include "epoch/network.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/config.h"
#include "base/error.h"
#include "base/limits.h"
#include "base/text.h"
#include "p2p/messenger.h"
#include "transport/shm/byte_pipe.h"
#include "transport/tcp/handshake.h"
#include "transport/tcp/stream.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/wait_guard.h"

namespace ringreduce {

Network::Network(std::unique_ptr<HostLinks> links)
    : links_(std::move(links)),
      options_(links_->options()),
      rank_(links_->rank()),
      size_(links_->size()),
      pages_(std::make_unique<RankPage[]>(static_cast<size_t>(size_))),
      reactor_(links_->reactor()) {
  if (!links_->ring().ranks.empty()) positions_ = positionsOf(links_->ring().ranks);
  for (int r = 0; r < size_; ++r)
    for (Announcement& announcement : pages_[static_cast<size_t>(r)].announcements)
      announcement.sequence = kNoOperation;
}

Network::~Network() {
  close();
}

void Network::close() {
  links_->close();
  std::unique_ptr<net::Control> control;
  {
    const std::lock_guard lock(calls_mutex_);
    control.swap(control_);
  }
  control.reset();  // its reports use the forwarder
  std::unique_ptr<net::MessageForwarder> forwarder;
  {
    const std::lock_guard lock(calls_mutex_);
    forwarder.swap(forwarder_);
  }
  forwarder.reset();
  for (net::Reactor::Timer timer : std::exchange(timers_, {})) reactor_->cancel(timer);
}

std::unique_ptr<PeerView> Network::view(const Hosts& hosts, const HostMemory& local_memory,
                                        const GroupOptions& options) {
  std::vector<Seat> seats;
  for (int r = 0; r < size_; ++r) {
    const bool is_here = hosts.hostOf(r) == hosts.hostOf(rank_);
    RankPage* const page = &pages_[static_cast<size_t>(r)];
    uint32_t* word = r == rank_ ? &page->messenger_wake_word : nullptr;
    in_memory_.push_back(is_here && !local_memory.members.empty());
    if (in_memory_.back()) word = &pageOf(local_memory, hosts.localRankOf(r)).messenger_wake_word;
    seats.push_back({.page = page,
                     .process = {},
                     .name = hosts.nameOf(r),
                     .pid = is_here ? hosts.pidOf(r) : 0,
                     .messenger_word = word});
  }
  auto view = std::make_unique<MirrorView>(rank_, std::move(seats), options, *this);
  view_ = view.get();
  return view;
}

// The pipes to the other ranks of this host; null if there are none.
std::unique_ptr<Neighbours> Network::neighbours(const Hosts& hosts,
                                                const HostMemory& local_memory) const {
  if (local_memory.members.empty()) return nullptr;
  const Layout at(local_memory.options, static_cast<int>(local_memory.members.size()),
                  /*pipes=*/true);
  std::vector<PipeMemory> members;
  std::vector<int> positions;
  for (int place = 0; const int rank : hosts.localRanks()) {
    std::byte* const memory = memoryOf(local_memory, place);
    members.push_back(
        {.page = &pageOf(local_memory, place),
         .boxes = reinterpret_cast<Box*>(memory + at.pipe_boxes),
         .rings = memory + at.pipe_rings,
         .doorbell = local_memory.members[static_cast<size_t>(place)].doorbell->get()});
    positions.push_back(positionOf(rank));
    ++place;
  }
  return std::make_unique<BasicNeighbours<>>(members, static_cast<size_t>(hosts.localRankOf(rank_)),
                                             positions);
}

void Network::tellCost(const WireCost& cost) const {
  if (rank_ == 0 && logsInfo())
    log("group '" + options_.name + "': algorithms are chosen for " +
        fixedText(8e-6 / cost.measured, 0) + " Mbit/s of a host, as calls have measured it");
}

// The one place that chooses between transports.
std::unique_ptr<Fabric> Network::makeFabric(std::unique_ptr<Neighbours> neighbours) const {
  TcpOptions tcp{.shown = links_->ring().ranks,
                 .lost_after = links_->lostAfter(),
                 .leaves_bbr = links_->congestion().empty()};
  // Each path is an interface's, and each gets its share.
  tcp.min_connections =
      std::max(net::initialConnections(static_cast<Nanos>(cost().roundTrip() * kSecond)),
               static_cast<int>(links_->mostPaths()));
  if (links_->connections() > 0) tcp.min_connections = tcp.max_connections = links_->connections();
  return std::make_unique<TcpFabric>(
      [this](int to, int number, const std::function<void()>& poll) {
        const int rank = positions_.empty() ? to : ring().ranks[static_cast<size_t>(to)];
        return links_->dial(rank, net::Purpose::kData, number, poll);
      },
      tcp, std::move(neighbours));
}

std::unique_ptr<Transport> Network::start(Arbiter& arbiter, const Hosts& hosts,
                                          const HostMemory& local_memory) {
  if (!positions_.empty())
    position_guard_ = std::make_unique<RingPositionGuard>(arbiter, ring().ranks);
  guard_ = position_guard_ ? position_guard_.get() : &arbiter;
  fabric_ = makeFabric(neighbours(hosts, local_memory));
  links_->releaseDescriptors();
  std::unique_ptr<Transport> transport = fabric_->make(positionOf(rank_), size_, *guard_);
  try {
    forwarder_ = net::MessageForwarder::start(
        reactor_, rank_, size_,
        [this](int to, int, const std::function<void()>& poll) {
          return links_->dial(to, net::Purpose::kMessages, 0, poll);
        },
        *this);
    carrier_ = forwarder_.get();
    net::Control::Options control;
    control.ring = links_->controlRing();
    for (int r = 0; r < size_; ++r) control.hosts.push_back(hosts.hostOf(r));
    control.lost_after = links_->lostAfter();
    control.goes_on = links_->sharedOptions().goesOn();
    arbiter_ = &arbiter;
    auto ring = net::Control::start(
        reactor_, rank_, size_, links_->takeNext(), links_->takePrevious(),
        [this](int to, int, const std::function<void()>& poll) {
          return links_->dial(to, net::Purpose::kControl, 0, poll);
        },
        *view_, control);
    {
      const std::lock_guard lock(calls_mutex_);
      control_ = std::move(ring);
    }
    transport_ = transport.get();
    // Only now: connections that are delivered need control_, forwarder_ and a transport.
    links_->deliverTo([this](net::Socket socket, const net::PeerHello& caller) {
      route(std::move(socket), caller);
    });
  } catch (...) {
    close();  // before the transport goes
    throw;
  }
  return transport;
}

void Network::route(net::Socket socket, const net::PeerHello& caller) {
  switch (caller.purpose) {
    case net::Purpose::kControl:
      return control_->accept(caller.from, std::move(socket));
    case net::Purpose::kMessages:
      return forwarder_->accept(caller.from, std::move(socket));
    case net::Purpose::kData:
      return fabric_->accept(positionOf(caller.from), std::move(socket));
    case net::Purpose::kSurvey:  // awaited elsewhere, or not needed any more
      return;
  }
}

std::vector<Engine::Channels> Network::channels(const Hosts& hosts,
                                                const HostMemory& local_memory) {
  own_ring_ = std::make_unique<std::byte[]>(kRingBytes);
  own_box_ = std::make_unique<Box>();
  std::vector<Engine::Channels> here, channels;
  if (in_memory_[static_cast<size_t>(rank_)])
    here = messageRings(local_memory, hosts.localRankOf(rank_));
  for (int r = 0; r < size_; ++r) {
    if (in_memory_[static_cast<size_t>(r)]) {
      channels.push_back(here[static_cast<size_t>(hosts.localRankOf(r))]);
      continue;
    }
    if (r == rank_) {
      channels.push_back({.out = {own_ring_.get(), own_box_->filled, own_box_->emptied},
                          .in = {own_ring_.get(), own_box_->filled, own_box_->emptied},
                          .consumed = &own_box_->consumed,
                          .acknowledged = &own_box_->consumed});
      continue;
    }
    const net::ChannelEnds ends = forwarder_->ends(r);
    channels.push_back({.out = {ends.out_ring, *ends.out_filled, *ends.out_emptied},
                        .in = {ends.in_ring, *ends.in_filled, *ends.in_emptied},
                        .consumed = ends.consumed,
                        .acknowledged = ends.acknowledged});
  }
  return channels;
}

void Network::handOver(void (*poll)(), Nanos timeout) {
  const std::lock_guard lock(leaving_);
  if (!forwarder_) return;
  const Arbiter& arbiter = *arbiter_.load();
  const Nanos limit = deadlineIn(timeout);
  for (Nanos nap = 100 * kMicrosecond;; nap = std::min(2 * nap, 5 * kMillisecond)) {
    std::vector<int> late = forwarder_->unsent();
    std::erase_if(late, [&](int r) { return !arbiter.stateOf(r).isHere(); });
    if (late.empty() || arbiter.failed()) return;
    if (now() >= limit)
      return log("rank " + options_.shown(rank_) + " left group '" + options_.name +
                 "' with messages that had not been sent after " + seconds(timeout) + ": " +
                 arbiter.peers().whereabouts(late) + " did not take them");
    if (poll) poll();
    std::this_thread::sleep_for(std::chrono::nanoseconds(nap));
  }
}

void Network::leaveWithin(Nanos longest) {
  leave_by_ = deadlineIn(std::min(longest, limits::kFlush));
}

void Network::leave() {
  const std::lock_guard lock(leaving_);
  // After a failure no rank receives messages any more.
  if (!arbiter_.load()->failed()) forwarder_->flush(leave_by_ - now());
  control_->flush(leave_by_ - now());  // a last try, if the time is over
  close();
}

// ---- PeerChannel

void Network::broadcastFailure(const GroupFailure& failure) {
  const std::lock_guard lock(calls_mutex_);
  if (control_) control_->broadcastFailure(failure);
}

void Network::depart(Declared how) {
  // Before the others know that this rank is gone, and measure its silence.
  if (how == Declared::kGone && transport_ && !arbiter_.load()->failed())
    transport_->leave(leave_by_ - now());
  control_->depart(how);
}

void Network::askForProgress(uint64_t since) {
  const std::lock_guard lock(calls_mutex_);
  if (control_) control_->askForProgress(since);
}

void Network::wakePeer(int rank) {
  const std::lock_guard lock(calls_mutex_);
  if (forwarder_) forwarder_->wake(rank);
}

bool Network::mayReceiveFrom(int rank) {
  return !in_memory_[static_cast<size_t>(rank)] && carrier_->mayReceiveFrom(rank);
}

void Network::callLater(Nanos delay, std::function<void()> then) {
  timers_.push_back(reactor_->at(now() + delay, std::move(then)));
}

// ---- reports of the message forwarder

void Network::onProgress(int) {
  if (arbiter_.load()) view_->wakeMessenger(rank_);
}

void Network::broken(int rank, const std::string& how, bool damaged) {
  view_->onDisconnect(rank, how, damaged);
}

}  // namespace ringreduce
