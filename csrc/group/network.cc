// Opening, routing connections, and passing on what is heard.
#include "group/network.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include "base/env.h"
#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "bootstrap/meeting.h"
#include "transport/places.h"
#include "transport/tcp/handshake.h"
#include "transport/tcp/lane_count.h"

namespace ringreduce {
namespace {

// How long a connection may take where nothing but that says that the other is gone: for control,
// or while no address of the other host answers at all.
constexpr Nanos kDialTime = 30 * kSecond;
constexpr size_t kMostPaths = 4;
// How long a rank that leaves waits until the others know.
constexpr Nanos kFlushTime = 5 * kSecond;
// A connection for messages ends when its rank leaves or fails, which goes round the ring
// meanwhile. How long it may take to come.
constexpr Nanos kExplained = 2 * kSecond;

std::string congestion() {
  return env("RINGREDUCE_CONGESTION").value_or("");
}

Nanos lostAfter() {
  return static_cast<Nanos>(envSeconds("RINGREDUCE_LOST_SECONDS", 3, 0.5, 3600) *
                            static_cast<double>(kSecond));
}

void checkLogLevel() {
  const std::string level = env("RINGREDUCE_LOG").value_or("");
  if (!level.empty() && level != "info")
    throw Error(Failure::kSetup,
                "RINGREDUCE_LOG=" + level + " can be 'info' only; correct or unset it");
}

// Which of a rank's addresses to share the data out to: those of the best one's family, since an
// interface may have an address of each.
std::vector<size_t> pathsOf(const net::Endpoint& endpoint) {
  std::vector<size_t> paths;
  for (size_t i = 0; i < endpoint.addresses.size(); ++i)
    if (endpoint.addresses[i].family() == endpoint.addresses[0].family()) paths.push_back(i);
  return paths;
}

}  // namespace

std::string Network::toldPart(const Hosts& hosts, int rank, int part) {
  std::string rest = hosts.toldBy(rank);
  for (; part > 0; --part) rest.erase(0, rest.find('|') + 1);
  return rest.substr(0, rest.find('|'));
}

std::string Network::open(const Hosts& hosts) {
  // Again, where what looked like a meeting was left over from an earlier one.
  admitted_.reset();
  early_.clear();
  who_.clear();
  neighbours_.clear();
  rank_ = hosts.rank();
  size_ = hosts.size();
  word_ = hosts.word();
  secret_ = net::secretFromText(hosts.secret());
  for (int r = 0; r < size_; ++r) who_.push_back(hosts.who(r));
  for (int r : hosts.neighbours())
    if (r != rank_) neighbours_.push_back(r);
  shared_ = options_.shared ? *options_.shared : SharedOptions::fromEnvironment(size_);
  shared_.validate();
  pages_ = std::make_unique<RankPage[]>(static_cast<size_t>(size_));
  for (int r = 0; r < size_; ++r)
    for (OpSignature& announcement : pages_[static_cast<size_t>(r)].announcements)
      announcement.sequence = kNoOperation;
  over_.assign(static_cast<size_t>(size_), false);
  progress_.assign(static_cast<size_t>(size_), {});
  unexplained_.assign(static_cast<size_t>(size_), 0);
  // Here, where the others are told.
  net::checkCongestion(congestion());
  lanes_ = static_cast<int>(envInteger("RINGREDUCE_LANES", 0, 0, Mesh::kMostLanes));
  lost_after_ = lostAfter();
  checkLogLevel();
  reactor_ = net::Reactor::shared();
  acceptor_ = net::Acceptor::shared(options_.store_host);
  if (logsInfo())
    log(who_[static_cast<size_t>(rank_)] + " of group '" + options_.name + "' is reached at " +
        acceptor_->choice());
  admitted_ = acceptor_->admit(
      word_, rank_, secret_,
      [this](net::Socket socket, const net::PeerHello& caller) { take(std::move(socket), caller); },
      shared_.encrypted);
  wish_ = env("RINGREDUCE_RING").value_or("");
  RingWish::fromText(wish_);  // likewise
  slowest_ = Slowness::fromEnvironment();
  return acceptor_->endpoint().text() + "|" + shared_.toText() + "|" + wish_;
}

Network::~Network() {
  close();
}

void Network::close() {
  admitted_.reset();
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
  Mesh::Options options{.algorithm = shared_.algorithm};
  options.cost = cost_;
  const std::vector<int>& ranks = host_ring_.ranks;
  options.shown = ranks;
  WaitGuard* watch = &session;
  if (!ranks.empty()) watch = (placed_ = std::make_unique<PlacesGuard>(session, ranks)).get();
  options.least_lanes = net::lanesAtFirst(static_cast<Nanos>(cost_.roundTrip() * kSecond));
  // Each path is an interface's, and each gets its share.
  for (const net::Endpoint& endpoint : endpoints_)
    options.least_lanes =
        std::max(options.least_lanes,
                 static_cast<int>(std::min<size_t>(kMostPaths, pathsOf(endpoint).size())));
  if (lanes_ > 0) options.least_lanes = options.most_lanes = lanes_;
  options.lost_after = lost_after_;
  return std::make_unique<Mesh>(
      placeOf(rank_), size_, *watch,
      [this](int to, int lane, const std::function<void()>& turn) {
        const int rank = places_.empty() ? to : host_ring_.ranks[static_cast<size_t>(to)];
        return dial(rank, net::Purpose::kData, lane, turn);
      },
      options);
}

std::unique_ptr<Mesh> Network::start(Session& session) {
  std::unique_ptr<Mesh> mesh = makeMesh(session);
  try {
    net::Control::Options control;
    control.ring = ring_;
    control.lost_after = lost_after_;
    session_ = &session;
    auto ring = net::Control::start(
        reactor_, rank_, size_, std::move(next_), std::move(previous_),
        [this](int to, int, const std::function<void()>& turn) {
          return dial(to, net::Purpose::kControl, 0, turn);
        },
        *this, control);
    {
      const std::lock_guard lock(calls_mutex_);
      control_ = std::move(ring);
    }
    // Not before: the reactor's thread, which waits for this lock, has had to start the ring.
    const std::lock_guard lock(mutex_);
    mesh_ = mesh.get();
    for (Early& early : early_) route(std::move(early.socket), early.caller);
    early_.clear();
  } catch (...) {
    close();  // before the mesh goes
    throw;
  }
  return mesh;
}

// Makes a connection and proves it.
net::Socket Network::dial(int to, net::Purpose purpose, int lane,
                          const std::function<void()>& turn) const {
  const std::vector<size_t> paths = pathsOf(endpoints_[static_cast<size_t>(to)]);
  const net::DialOptions options{
      // A rank that is stopped is not lost: it is waited for until it is seen to be, or nobody
      // wants it any more.
      .timeout = purpose == net::Purpose::kControl ? std::min(options_.timeout, kDialTime) : kNever,
      .deaf = kDialTime,
      .congestion =
          purpose == net::Purpose::kData || purpose == net::Purpose::kSurvey ? congestion() : "",
      .address = paths[static_cast<size_t>(lane) % paths.size()],
      .turn = [](void* context) { (*static_cast<const std::function<void()>*>(context))(); },
      .context = const_cast<std::function<void()>*>(&turn)};
  const net::PeerHello self{.group = word_,
                            .from = rank_,
                            .to = to,
                            .purpose = purpose,
                            .lane = lane,
                            .encrypted = shared_.encrypted};
  return net::dial(endpoints_[static_cast<size_t>(to)], self, secret_, options,
                   who_[static_cast<size_t>(to)]);
}

void Network::take(net::Socket socket, const net::PeerHello& caller) {
  if (caller.from < 0 || caller.from >= size_ || caller.from == rank_) return;
  const std::lock_guard lock(mutex_);
  if (mesh_)
    route(std::move(socket), caller);
  else
    early_.push_back({std::move(socket), caller});
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
  const std::lock_guard lock(progress_mutex_);
  auto& [progress, heard] = progress_[static_cast<size_t>(rank)];
  progress = there.streams;
  if (!there.stopped) heard = now();
}

net::Whereabouts Network::own(uint64_t since) {
  net::Whereabouts here;
  here.waits_for = session_.load()->waitsFor();
  session_.load()->here(here.announced, here.last, since, here.earlier);
  here.streams = progressOf(rank_).first;
  return here;
}

void Network::publishProgress(const StreamProgress& own) {
  const std::lock_guard lock(progress_mutex_);
  progress_[static_cast<size_t>(rank_)] = {own, now()};
}

std::pair<StreamProgress, Nanos> Network::progressOf(int rank) {
  const std::lock_guard lock(progress_mutex_);
  return progress_[static_cast<size_t>(rank)];
}

std::vector<int> Network::stopped() {
  return session_.load()->stoppedOf(neighbours_);
}

}  // namespace ringreduce
