// A rank in the control ring: its connections, the news that it forwards, and the calls of
// control.h.
#include "control/control.h"

#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/limits.h"
#include "base/text.h"
#include "control/clock_offset.h"
#include "control/control_frames.h"

namespace ringreduce::net {

// ---- one rank; all of it runs in the reactor's thread

class ControlNode : public std::enable_shared_from_this<ControlNode> {
 public:
  ControlNode(std::shared_ptr<Reactor> reactor, int rank, int size, Dial dial,
              Control::Listener& listener, const Control::Options& options)
      : reactor_(std::move(reactor)),
        me_(rank),
        options_(options),
        listener_(listener),
        ring_(size, options.ring),
        state_(size),
        offset_(rank == 0 ? ClockOffset{.error = 0} : ClockOffset{}),
        connector_(std::move(dial), options.lost_after) {}

  void begin(Socket next, Socket previous);
  void end();
  bool isOver() const { return over_; }
  void stopConnecting() { connector_.stop(); }
  void add(int peer, Socket socket, bool proven, bool dialled);
  void broadcastFailure(const GroupFailure& failure);
  void depart(Declared how);
  void askForProgress(uint64_t since);
  bool isFlushed();

 private:
  struct Connection {
    Connection(int p, Socket s, int size, bool shares_clock)
        : peer(p), socket(std::move(s)), in(size), clock(shares_clock) {}
    const int peer;
    Socket socket;
    ControlReader in;
    NeighbourClock clock;
    Outbox outbox;         // frames still to be sent
    std::string out;       // bytes still to be written
    bool proven = false;   // bytes have come over it, so its end is a failure
    bool dialled = false;  // by this rank, to close a gap
    bool writable = true, needed = true, told_not_needed = false;
    int unheard = 0;                   // heartbeats sent since bytes came
    int error = 0;                     // of writing
    uint64_t sent = 0, last_news = 0;  // bytes written, and the end of the latest news in them
  };
  using Link = std::shared_ptr<Connection>;

  template <class F>
  auto later(F&& f) {
    return [self = weak_from_this(), f = std::forward<F>(f)](auto&&... rest) mutable {
      if (const auto ring = self.lock(); ring && !ring->over_) f(*ring, rest...);
    };
  }

  // connections
  void ready(const Link& link, uint32_t events);
  void receive(const Link& link);
  void receiveLater(const Link& link);
  void send(Connection& link);
  void sendAll();
  void onDisconnect(const Link& link, int error, bool nonsense);
  void sendHeartbeats();
  void addHeartbeat(Connection& link) const;
  bool isLinked(int rank) const;
  // received frames
  void take(const Link& link, const ControlFrame& frame);
  void onHeartbeat(Connection& link, const Heartbeat& beat);
  void onBroken(const Broken& broken, Connection* from);
  void onAnswer(const Answer& answer, Connection* from);
  void answer(uint64_t since);
  bool isNews(const Progress& own) const;
  void forward(Outbox::Item item, const Connection* from);
  // gaps, cuts and lost ranks
  void closeGaps();
  void dialNext();
  void notReached(int rank);
  void reportCut();
  void reportLost(std::vector<int> ranks, Observed observed, const std::string& how);
  // Whether the group has come to its end: a loss is not one if the ranks go on.
  bool hasFailed() const {
    return state_.failure && !(options_.goes_on && state_.failure->kind == Failure::kPeerLost);
  }
  bool listens() const { return !hasFailed() && state_.departure(me_) != Declared::kGone; }
  std::string noPacket(size_t ranks) const;

  const std::shared_ptr<Reactor> reactor_;
  const int me_;
  const Control::Options options_;
  Control::Listener& listener_;
  ControlRing ring_;
  ControlState state_;
  std::vector<Link> links_;
  ClockOffset offset_;
  Nanos measured_ = 0;  // when
  bool over_ = false;

  Reactor::Timer heart_ = 0, settling_ = 0, again_ = 0;
  Nanos next_question_ = 0, next_answer_ = 0;
  ControlRing::Cuts cuts_;
  std::set<int> reported_lost_;
  bool dialling_ = false;
  std::set<int> not_reached_;  // ranks that could not be connected across a gap
  std::map<int, Nanos> silent_since_;
  Connector connector_;
};

// ---- connections

namespace {

// The number of heartbeats sent without any answer.  After that only TCP's keepalive probes are
// sent. The other kernel answers those even if the process is stopped.  More heartbeats would fill
// the receive window of a stopped process, which looks like a lost host.
constexpr int kUnheard = 64;
constexpr int kReadsATurn = 16;

bool meansUnreachable(int error) {
  return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH ||
         error == EHOSTDOWN || error == ENETDOWN;
}

// Makes the kernel end a connection whose other host is lost.
void setTimeouts(int socket, const Control::Options& options) {
  const auto set = [socket](int level, int name, int value) {
    setsockopt(socket, level, name, &value, sizeof value);  // a socket that is not TCP has none
  };
  // Counted from the first unacknowledged heartbeat, which may be sent one period late.
  const Nanos silence = std::max(options.heartbeat, options.lost_after - options.heartbeat);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(silence / kMillisecond));
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 1);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 1);
  set(IPPROTO_TCP, TCP_NODELAY, 1);
}

}  // namespace

void ControlNode::begin(Socket next, Socket previous) {
  if (next) add(ring_.next(me_), std::move(next), true, false);
  if (previous) add(ring_.previous(me_), std::move(previous), true, false);
  sendHeartbeats();
}

void ControlNode::end() {
  over_ = true;
  for (Reactor::Timer timer : {heart_, settling_, again_}) reactor_->cancel(timer);
  for (const Link& link : links_) {
    reactor_->forget(link->socket.get());
    link->socket.reset();
  }
  links_.clear();
}

void ControlNode::add(int peer, Socket socket, bool proven, bool dialled) {
  setTimeouts(socket.get(), options_);
  const auto host = [&](int r) { return options_.hosts[static_cast<size_t>(r)]; };
  const bool shares_clock = !options_.hosts.empty() && host(peer) == host(me_);
  auto link = std::make_shared<Connection>(peer, std::move(socket), state_.size(), shares_clock);
  link->proven = proven;
  link->dialled = dialled;
  link->outbox = state_.all();
  try {
    reactor_->watch(link->socket.get(), EPOLLIN | EPOLLOUT,
                    later([link = std::weak_ptr(link)](ControlNode& ring, uint32_t events) {
                      if (const Link there = link.lock()) ring.ready(there, events);
                    }));
  } catch (const Error& error) {
    // As if it had not been made: its end would not be noticed.
    if (proven) throw;
    log("lost a control connection with rank " + std::to_string(peer) + ": " + error.what());
    if (dialled) notReached(peer);
    return closeGaps();
  }
  links_.push_back(link);
  // At once, also without news: a connection counts as proven once bytes have come over it.
  addHeartbeat(*link);
  send(*link);
  if (link->socket.holdsBytes()) receiveLater(link);
  closeGaps();
}

// Receives bytes that the socket holds already, for which epoll reports nothing.
void ControlNode::receiveLater(const Link& link) {
  reactor_->soon(later([link = std::weak_ptr(link)](ControlNode& ring) {
    const Link there = link.lock();
    if (there && std::ranges::count(ring.links_, there) > 0) ring.receive(there);
  }));
}

void ControlNode::ready(const Link& link, uint32_t events) {
  if (events & EPOLLOUT) {
    link->writable = true;
    reactor_->change(link->socket.get(), EPOLLIN);
    send(*link);
  }
  if (events & ~static_cast<uint32_t>(EPOLLOUT)) receive(link);
  if (link->error != 0 && std::ranges::find(links_, link) != links_.end()) receive(link);
}

void ControlNode::receive(const Link& link) {
  std::array<std::byte, 16 << 10> bytes;
  for (int i = 0; i < kReadsATurn; ++i) {
    const ssize_t n = link->socket.receive(bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (n <= 0) return onDisconnect(link, n < 0 ? errno : 0, n < 0 && errno == EBADMSG);
    link->unheard = 0;
    link->in.feed({bytes.data(), static_cast<size_t>(n)});
    while (const auto frame = link->in.next()) {
      if (!link->proven) {
        link->proven = true;
        not_reached_.clear();
        silent_since_.erase(link->peer);
        closeGaps();
      }
      take(link, *frame);
      if (over_) return;
    }
    if (link->in.failed()) return onDisconnect(link, 0, true);
  }
  if (link->socket.holdsBytes()) receiveLater(link);
}

// Writes news, as far as the kernel takes it.
void ControlNode::send(Connection& link) {
  while (link.writable && link.error == 0) {
    if (link.out.empty()) {
      // A stopped process does not read: send it no questions and answers.
      state_.take(link.outbox, link.unheard < kUnheard, link.out);
      if (link.out.empty()) return;
      link.last_news = link.sent + link.out.size();
    }
    const ssize_t n = link.socket.send(link.out.data(), link.out.size());
    if (n >= 0) {
      link.sent += static_cast<uint64_t>(n);
      link.out.erase(0, static_cast<size_t>(n));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      link.writable = false;
      reactor_->change(link.socket.get(), EPOLLIN | EPOLLOUT);
    } else if (errno != EINTR) {
      // Bytes that came before are still to be read; receive() finds the end.
      link.error = errno;
      reactor_->change(link.socket.get(), EPOLLIN | EPOLLOUT);
    }
  }
}

void ControlNode::sendAll() {
  for (const Link& link : std::vector<Link>(links_)) send(*link);
}

void ControlNode::sendHeartbeats() {
  for (const Link& link : std::vector<Link>(links_)) {
    if (link->out.empty() && link->unheard < kUnheard) {
      ++link->unheard;
      addHeartbeat(*link);
    }
    send(*link);
  }
  heart_ = reactor_->at(now() + options_.heartbeat,
                        later([](ControlNode& ring) { ring.sendHeartbeats(); }));
}

void ControlNode::addHeartbeat(Connection& link) const {
  link.out += encode(
      Heartbeat{.sent = monotonicNow(), .difference = link.clock.difference(), .offset = offset_});
}

bool ControlNode::isFlushed() {
  if (over_) return true;
  sendAll();
  const bool gone = state_.departure(me_) == Declared::kGone && !hasFailed();
  return std::ranges::all_of(links_, [&](const Link& link) {
    if (link->error != 0) return true;
    if (gone && link->needed && ring_.has(link->peer)) return false;
    // Heartbeats are always in flight: check only that the last news has arrived.
    int under_way = 0;
    if (ioctl(link->socket.get(), SIOCOUTQ, &under_way) != 0) under_way = 0;
    return link->out.empty() && link->outbox.empty() &&
           (under_way == 0 || link->sent >= link->last_news + static_cast<uint64_t>(under_way));
  });
}

bool ControlNode::isLinked(int rank) const {
  return rank == me_ || std::ranges::any_of(links_, [&](const Link& link) {
           return link->peer == rank && link->proven;
         });
}

// A connection has ended.
void ControlNode::onDisconnect(const Link& link, int error, bool nonsense) {
  reactor_->forget(link->socket.get());
  std::erase(links_, link);
  link->socket.reset();
  if (meansUnreachable(link->error)) error = link->error;
  const int peer = link->peer;
  // A departed rank ends its connections; after a failure all ranks do.
  if (!ring_.has(peer) || hasFailed()) return closeGaps();
  if (!link->proven) {
    if (link->dialled) notReached(peer);
    return closeGaps();
  }
  if (isLinked(peer)) return closeGaps();
  const auto how = nonsense                  ? Broken::How::kNonsense
                   : meansUnreachable(error) ? Broken::How::kUnreachable
                                             : Broken::How::kEnded;
  onBroken({me_, peer, how}, nullptr);
}

// ---- news

namespace {

std::string textOf(Broken::How how) {
  if (how == Broken::How::kEnded) return kProcessEnded;
  if (how == Broken::How::kSilent) return "it answers nobody any more";
  return "its control connection carried what no rank sends";
}

}  // namespace

void ControlNode::take(const Link& link, const ControlFrame& frame) {
  Connection* from = link.get();
  if (const auto* beat = std::get_if<Heartbeat>(&frame)) {
    onHeartbeat(*from, *beat);
  } else if (const auto* departed = std::get_if<Departed>(&frame)) {
    if (departed->rank == me_ || !state_.depart(departed->rank, departed->how)) return;
    if (departed->how == Declared::kGone) ring_.remove(departed->rank);
    forward({Outbox::Kind::kDeparture, departed->rank}, from);
    listener_.onDeparture(departed->rank, departed->how);
    closeGaps();
  } else if (const auto* failure = std::get_if<GroupFailure>(&frame)) {
    if (state_.failure) return;
    state_.failure = *failure;
    if (hasFailed()) reactor_->cancel(std::exchange(settling_, 0));  // it names the culprit
    forward({Outbox::Kind::kFailure, 0}, from);
    if (state_.departure(me_) != Declared::kGone) listener_.onRemoteFailure(*failure);
    closeGaps();
  } else if (const auto* broken = std::get_if<Broken>(&frame)) {
    onBroken(*broken, from);
  } else if (const auto* question = std::get_if<Question>(&frame)) {
    if (question->asker == me_ || !state_.asked(*question)) return;
    forward({Outbox::Kind::kQuestion, question->asker}, from);
    // Its answers serve this rank too, and ranks do not repeat an answer within this time.
    next_question_ = std::max(next_question_, now() + options_.heartbeat / 2);
    answer(question->since);
  } else if (const auto* answer = std::get_if<Answer>(&frame)) {
    onAnswer(*answer, from);
  } else if (std::holds_alternative<Bridged>(frame)) {
    from->needed = false;
  }
}

// A heartbeat that tells the neighbour what it does not know yet is sent at once.
void ControlNode::onHeartbeat(Connection& link, const Heartbeat& beat) {
  const Nanos time = monotonicNow();
  link.clock.add(beat, time);
  const bool was_known = offset_.isKnown();
  if (me_ != 0) {
    // The last one, grown old, may still be the best.
    if (was_known) offset_.error += NeighbourClock::drift(time - measured_);
    for (const Link& one : links_)
      if (const ClockOffset by = one->clock.offset(time); by.error < offset_.error) offset_ = by;
    measured_ = time;
  }
  if (offset_.isKnown()) listener_.onClock(offset_);
  for (const Link& one : std::vector<Link>(links_)) {
    const bool is_news = was_known != offset_.isKnown() ||
                         (one.get() == &link && beat.sent != 0 && beat.difference == kNever);
    if (!is_news || !one->out.empty()) continue;
    addHeartbeat(*one);
    send(*one);
  }
}

void ControlNode::onBroken(const Broken& broken, Connection* from) {
  if (broken.rank == me_ && broken.reporter != me_ && broken.how != Broken::How::kUnreachable)
    return;  // this rank lives: the other ranks will report the failure
  const std::optional<int> number = state_.broke(broken);
  if (!number) return;
  forward({Outbox::Kind::kBroken, *number}, from);
  if (broken.how == Broken::How::kUnreachable) {
    cuts_.insert(std::minmax(broken.reporter, broken.rank));
    reactor_->cancel(settling_);
    settling_ = reactor_->at(now() + options_.heartbeat + limits::kSecondCut,
                             later([](ControlNode& ring) { ring.reportCut(); }));
    return;
  }
  if (!ring_.has(broken.rank)) return;
  ring_.remove(broken.rank);
  reportLost({broken.rank},
             broken.how == Broken::How::kEnded ? Observed::kEnded : Observed::kUnreachable,
             textOf(broken.how));
  closeGaps();
}

void ControlNode::onAnswer(const Answer& answer, Connection* from) {
  if (answer.rank == me_ || !state_.answered(answer)) return;
  forward({Outbox::Kind::kAnswer, answer.rank}, from);
  if (!listens()) return;
  listener_.onProgress(answer.rank, answer.there);
  for (int rank : answer.stopped) {
    if (rank == me_) continue;
    Progress there = state_.lastSeen(rank);
    there.stopped = true;
    listener_.onProgress(rank, there);
  }
}

// Whether it is more than this rank answered last.
bool ControlNode::isNews(const Progress& own) const {
  const Progress said = state_.lastSeen(me_);
  const auto first = [](const Progress& there) {
    return there.announced - std::min<uint64_t>(there.announced, 1 + there.earlier.size());
  };
  return own.announced != said.announced || first(own) < first(said) || own.streams != said.streams;
}

void ControlNode::answer(uint64_t since) {
  const Nanos time = now();
  const bool soon = time < next_answer_;
  if (!listens() || (soon && since == kNoOperation)) return;
  Progress own = listener_.ownProgress(since);
  if (soon && !isNews(own)) return;
  next_answer_ = time + options_.heartbeat / 2;
  state_.answered({.rank = me_,
                   .number = state_.answersOf(me_) + 1,
                   .there = std::move(own),
                   .stopped = listener_.stoppedOnHost()});
  forward({Outbox::Kind::kAnswer, me_}, nullptr);
}

void ControlNode::forward(Outbox::Item item, const Connection* from) {
  for (const Link& link : std::vector<Link>(links_)) {
    if (link.get() == from) continue;
    link->outbox.add(item);
    send(*link);
  }
}

// ---- news of this rank

void ControlNode::broadcastFailure(const GroupFailure& failure) {
  if (state_.failure) return;
  state_.failure = failure;
  if (hasFailed()) reactor_->cancel(std::exchange(settling_, 0));
  forward({Outbox::Kind::kFailure, 0}, nullptr);
  closeGaps();
}

void ControlNode::depart(Declared how) {
  if (how == Declared::kHere || !state_.depart(me_, how)) return;
  forward({Outbox::Kind::kDeparture, me_}, nullptr);
  closeGaps();
}

void ControlNode::askForProgress(uint64_t since) {
  const Nanos time = now();
  if (time < next_question_ && since == kNoOperation) return;
  next_question_ = time + options_.heartbeat;
  state_.asked({me_, state_.questionsOf(me_) + 1, since});
  forward({Outbox::Kind::kQuestion, me_}, nullptr);
  answer(since);  // the other ranks, which need not ask now, need this rank's progress too
}

// ---- gaps, cuts and lost ranks

// Keeps this rank connected to both neighbours, and releases ranks that left.
void ControlNode::closeGaps() {
  if (over_) return;
  const bool gone = state_.departure(me_) == Declared::kGone;
  if (!gone && !hasFailed()) dialNext();
  const bool bridged =
      gone || hasFailed() || (isLinked(ring_.next(me_)) && isLinked(ring_.previous(me_)));
  if (!bridged) return;
  for (const Link& link : std::vector<Link>(links_)) {
    if (link->told_not_needed || state_.departure(link->peer) != Declared::kGone) continue;
    link->told_not_needed = true;
    link->out += encode(Bridged{});
    send(*link);
  }
}

// After the next rank has gone: connects to the one that is next now.
void ControlNode::dialNext() {
  if (dialling_ || cuts_.contains(std::minmax(me_, ring_.next(me_)))) return;
  int target = ring_.next(me_);
  while (target != me_ && not_reached_.contains(target)) target = ring_.next(target);
  const bool exists =
      std::ranges::any_of(links_, [&](const Link& link) { return link->peer == target; });
  if (target == me_ || exists) return;
  dialling_ = true;
  auto taken = later([target](ControlNode& ring, const std::shared_ptr<Socket>& socket) {
    ring.dialling_ = false;
    if (*socket) return ring.add(target, std::move(*socket), false, true);
    ring.notReached(target);
    ring.closeGaps();
  });
  connector_.call(target, 0, [reactor = reactor_, taken](Socket socket, const ConnectFailure&) {
    reactor->soon(
        [taken, fd = std::make_shared<Socket>(std::move(socket))]() mutable { taken(fd); });
  });
}

// The connection across a gap to this rank failed.  It may have left or ended as well, and the
// ranks beyond it may know.  If none of them knows, it is reported as lost after `lost_after`.
void ControlNode::notReached(int rank) {
  not_reached_.insert(rank);
  const Nanos since = silent_since_.try_emplace(rank, now()).first->second;
  if (now() - since >= options_.lost_after)
    return onBroken({me_, rank, Broken::How::kSilent}, nullptr);
  if (again_ != 0) return;
  again_ = reactor_->at(now() + options_.heartbeat / 2, later([](ControlNode& node) {
                          node.again_ = 0;
                          node.not_reached_.clear();
                          node.closeGaps();
                        }));
}

// Once all cuts of a partition are known.
void ControlNode::reportCut() {
  settling_ = 0;
  if (!listens()) return;
  std::vector<int> linked;
  for (const Link& link : links_)
    if (link->proven) linked.push_back(link->peer);
  std::vector<int> ranks = ring_.beyond(me_, cuts_, linked);
  if (ranks.empty()) {
    // Only one connection is cut: its two ends report each other.
    for (const auto& [one, other] : cuts_)
      for (int r : {one, other})
        if ((one == me_ || other == me_) && r != me_ && ring_.has(r) && !isLinked(r))
          ranks.push_back(r);
  }
  const std::string how = noPacket(ranks.size());
  reportLost(std::move(ranks), Observed::kUnreachable, how);
}

std::string ControlNode::noPacket(size_t ranks) const {
  return std::string("no packet from ") + (ranks > 1 ? "their hosts" : "its host") + " came for " +
         seconds(options_.lost_after);
}

void ControlNode::reportLost(std::vector<int> ranks, Observed observed, const std::string& how) {
  std::erase_if(ranks, [&](int rank) { return !reported_lost_.insert(rank).second; });
  std::sort(ranks.begin(), ranks.end());
  if (!ranks.empty() && listens()) listener_.onPeersLost(ranks, observed, how);
}

// ---- the calls of control.h, from any thread

Control::Control(std::shared_ptr<Reactor> reactor, std::shared_ptr<ControlNode> node)
    : reactor_(std::move(reactor)), node_(std::move(node)) {}

Control::~Control() {
  reactor_->run([&] { node_->end(); });
  node_->stopConnecting();
}

template <class F>
void Control::soon(F f) {
  reactor_->soon([node = node_, f = std::move(f)] {
    if (!node->isOver()) f(*node);
  });
}

void Control::accept(int from, Socket socket) {
  soon([from, socket = std::make_shared<Socket>(std::move(socket))](ControlNode& node) {
    node.add(from, std::move(*socket), false, false);
  });
}

void Control::broadcastFailure(const GroupFailure& failure) {
  soon([failure](ControlNode& node) { node.broadcastFailure(failure); });
}

void Control::depart(Declared how) {
  soon([how](ControlNode& node) { node.depart(how); });
}

void Control::askForProgress(uint64_t since) {
  soon([since](ControlNode& node) { node.askForProgress(since); });
}

bool Control::flush(Nanos longest) {
  return reactor_->waitUntil(longest, [&] { return node_->isFlushed(); });
}

std::unique_ptr<Control> Control::start(std::shared_ptr<Reactor> reactor, int rank, int size,
                                        Socket next, Socket previous, Dial dial, Listener& listener,
                                        const Options& options) {
  if (size > kMostControlRanks)
    throw Error(Failure::kSetup, "a group over several hosts has at most " +
                                     std::to_string(kMostControlRanks) + " ranks");
  auto node =
      std::make_shared<ControlNode>(reactor, rank, size, std::move(dial), listener, options);
  std::unique_ptr<Control> control(new Control(reactor, node));
  reactor->run([&] { node->begin(std::move(next), std::move(previous)); });
  return control;
}

}  // namespace ringreduce::net
