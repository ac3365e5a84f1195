// Routes connections, and passes on what is heard.
#include "group/network.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "transport/places.h"
#include "transport/tcp/handshake.h"
#include "transport/tcp/lane_count.h"

namespace ringreduce {
namespace {

// How long a rank that leaves waits until the others know.
constexpr Nanos kFlushTime = 5 * kSecond;
// A connection for messages ends when its rank leaves or fails, which goes round the ring
// meanwhile. How long it may take to come.
constexpr Nanos kExplained = 2 * kSecond;

}  // namespace

Network::Network(std::unique_ptr<HostLinks> links, const Hosts& hosts)
    : links_(std::move(links)),
      options_(links_->options()),
      rank_(links_->rank()),
      size_(links_->size()),
      pages_(std::make_unique<RankPage[]>(static_cast<size_t>(size_))),
      reactor_(links_->reactor()),
      over_(static_cast<size_t>(size_)),
      unexplained_(static_cast<size_t>(size_)) {
  if (!links_->ring().ranks.empty()) places_ = placesOf(links_->ring().ranks);
  for (int r : hosts.neighbours())
    if (r != rank_) neighbours_.push_back(r);
  for (int r = 0; r < size_; ++r)
    for (OpSignature& announcement : pages_[static_cast<size_t>(r)].announcements)
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
  control.reset();  // what it tells looks at the pump
  std::unique_ptr<net::Pump> pump;
  {
    const std::lock_guard lock(calls_mutex_);
    pump.swap(pump_);
  }
  pump.reset();
  for (net::Reactor::Timer& timer : unexplained_)
    if (timer != 0) reactor_->cancel(std::exchange(timer, 0));
}

std::vector<Seat> Network::seats(const Hosts& hosts) {
  std::vector<Seat> seats;
  for (int r = 0; r < size_; ++r)
    seats.push_back({.page = &pages_[static_cast<size_t>(r)],
                     .process = nullptr,
                     .name = hosts.nameOf(r),
                     .pid = hosts.hostOf(r) == hosts.hostOf(rank_) ? hosts.pidOf(r) : 0});
  return seats;
}

std::unique_ptr<Mesh> Network::makeMesh(Session& session) {
  Mesh::Options options{.algorithm = links_->sharedOptions().algorithm};
  options.cost = links_->cost();
  const std::vector<int>& ranks = links_->ring().ranks;
  options.shown = ranks;
  WaitGuard* watch = &session;
  if (!ranks.empty()) watch = (placed_ = std::make_unique<PlacesGuard>(session, ranks)).get();
  // Each path is an interface's, and each gets its share.
  options.least_lanes =
      std::max(net::lanesAtFirst(static_cast<Nanos>(options.cost.roundTrip() * kSecond)),
               static_cast<int>(links_->mostPaths()));
  if (links_->lanes() > 0) options.least_lanes = options.most_lanes = links_->lanes();
  options.lost_after = links_->lostAfter();
  return std::make_unique<Mesh>(
      placeOf(rank_), size_, *watch,
      [this](int to, int lane, const std::function<void()>& turn) {
        const int rank = places_.empty() ? to : links_->ring().ranks[static_cast<size_t>(to)];
        return links_->dial(rank, net::Purpose::kData, lane, turn);
      },
      options);
}

std::unique_ptr<Mesh> Network::start(Session& session) {
  std::unique_ptr<Mesh> mesh = makeMesh(session);
  try {
    pump_ = net::Pump::start(
        reactor_, rank_, size_,
        [this](int to, int, const std::function<void()>& turn) {
          return links_->dial(to, net::Purpose::kMessages, 0, turn);
        },
        *this);
    carrier_ = pump_.get();
    net::Control::Options control;
    control.ring = links_->controlRing();
    control.lost_after = links_->lostAfter();
    session_ = &session;
    auto ring = net::Control::start(
        reactor_, rank_, size_, links_->takeNext(), links_->takePrevious(),
        [this](int to, int, const std::function<void()>& turn) {
          return links_->dial(to, net::Purpose::kControl, 0, turn);
        },
        *this, control);
    {
      const std::lock_guard lock(calls_mutex_);
      control_ = std::move(ring);
    }
    mesh_ = mesh.get();
    // Not before: the reactor's thread, which waits for its lock, has had to start the ring.
    links_->deliverTo([this](net::Socket socket, const net::PeerHello& caller) {
      route(std::move(socket), caller);
    });
  } catch (...) {
    close();  // before the mesh goes
    throw;
  }
  return mesh;
}

void Network::route(net::Socket socket, const net::PeerHello& caller) {
  switch (caller.purpose) {
    case net::Purpose::kControl:
      return control_->accept(caller.from, std::move(socket));
    case net::Purpose::kMessages:
      return pump_->accept(caller.from, std::move(socket));
    case net::Purpose::kData:
      return mesh_->accept(placeOf(caller.from), std::move(socket));
    case net::Purpose::kSurvey:  // is awaited, or nobody's any more
      return;
  }
}

std::vector<Engine::Wire> Network::channels() {
  own_ring_ = std::make_unique<std::byte[]>(kRingBytes);
  own_box_ = std::make_unique<Box>();
  std::vector<Engine::Wire> wires;
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) {
      wires.push_back({.out = {own_ring_.get(), own_box_->filled, own_box_->emptied},
                       .in = {own_ring_.get(), own_box_->filled, own_box_->emptied},
                       .consumed = &own_box_->consumed,
                       .acknowledged = &own_box_->consumed});
      continue;
    }
    const net::Pump::Ends ends = pump_->ends(r);
    wires.push_back({.out = {ends.out_ring, *ends.out_filled, *ends.out_emptied},
                     .in = {ends.in_ring, *ends.in_filled, *ends.in_emptied},
                     .consumed = ends.consumed,
                     .acknowledged = ends.acknowledged});
  }
  return wires;
}

void Network::handOver(void (*turn)(), Nanos timeout) {
  const std::lock_guard lock(leaving_);
  if (!pump_) return;
  const Session& session = *session_.load();
  const Nanos limit = deadlineIn(timeout);
  for (Nanos nap = 100 * kMicrosecond;; nap = std::min(2 * nap, 5 * kMillisecond)) {
    std::vector<int> late = pump_->unsent();
    std::erase_if(late, [&](int r) { return session.stateOf(r) != PeerState::kHere; });
    if (late.empty() || session.failed()) return;
    if (now() >= limit)
      return log("rank " + options_.shown(rank_) + " left group '" + options_.name +
                 "' with messages that had not been sent after " + seconds(timeout) + ": " +
                 session.whereabouts(late) + " did not take them");
    if (turn) turn();
    std::this_thread::sleep_for(std::chrono::nanoseconds(nap));
  }
}

void Network::leave() {
  const std::lock_guard lock(leaving_);
  // Of a group that has failed nobody receives anything any more.
  if (!session_.load()->failed()) pump_->flush(kFlushTime);
  control_->flush(kFlushTime);
  close();
}

// ---- what the session says

void Network::tell(Failure kind, int culprit, const std::string& text) {
  const std::lock_guard lock(calls_mutex_);
  if (control_) control_->tell({.kind = kind, .culprit = culprit, .reporter = rank_, .text = text});
}

void Network::depart(Departure how) {
  // Before anybody hears that this rank is gone, and counts how long it is quiet.
  if (how == Departure::kGone && mesh_ && !session_.load()->failed()) mesh_->leave(kFlushTime);
  control_->depart(how);
}

void Network::ask(uint64_t since) {
  const std::lock_guard lock(calls_mutex_);
  if (control_) control_->ask(since);
}

void Network::stir(int rank) {
  const std::lock_guard lock(calls_mutex_);
  if (pump_) pump_->stir(rank);
}

// ---- what the others say

void Network::lost(const std::vector<int>& ranks, PeerState fate, const std::string& how) {
  session_.load()->lose(ranks, fate, how);
  if (fate != PeerState::kEnded) return;
  for (int r : ranks) {
    over_[static_cast<size_t>(r)] = true;
    hearOut(r);
  }
}

void Network::departed(int rank, Departure how) {
  session_.load()->learnDeparture(rank, how);
  if (how != Departure::kGone) return;
  over_[static_cast<size_t>(rank)] = true;
  hearOut(rank);
}

void Network::broken(int rank, const std::string& how, bool damaged) {
  hearOut(rank);
  // Both may be well, and the way between them not: messages are missing, and nobody else saw it.
  net::Reactor::Timer& timer = unexplained_[static_cast<size_t>(rank)];
  if (timer == 0)
    timer = reactor_->at(now() + (damaged ? 0 : kExplained),
                         [this, rank, how] { session_.load()->miss(rank, how); });
}

// A connection that is still open may carry more of what a rank has sent before it went.
void Network::hearOut(int rank) {
  if (over_[static_cast<size_t>(rank)] && !carrier_->hears(rank)) session_.load()->hearOut(rank);
}

void Network::stirred(int) {
  if (Session* session = session_.load()) session->ringMessenger(rank_);
}

void Network::ended(const net::Verdict& verdict) {
  session_.load()->learn(verdict.kind, verdict.culprit, verdict.reporter, verdict.text);
}

void Network::seen(int rank, const net::Whereabouts& there) {
  session_.load()->see(rank, there.announced, there.last, there.waits_for, there.stopped,
                       there.earlier);
}

net::Whereabouts Network::own(uint64_t since) {
  net::Whereabouts here;
  here.waits_for = session_.load()->waitsFor();
  session_.load()->here(here.announced, here.last, since, here.earlier);
  return here;
}

std::vector<int> Network::stopped() {
  return session_.load()->stoppedOf(neighbours_);
}

}  // namespace ringreduce
