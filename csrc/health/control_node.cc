// The connections: bytes in, bytes out, heartbeats, and their ends.
#include "health/control_node.h"

#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "base/error.h"
#include "base/log.h"

namespace ringreduce::net {
namespace {

// Heartbeats that a rank sends without hearing anything.  Then it leaves it to TCP's own probes,
// which the other system answers although nobody reads: bytes that a stopped process does not read
// would fill its window in the end, and that looks like a black hole.
constexpr int kUnheard = 64;
constexpr int kReadsATurn = 16;

bool meansUnreachable(int error) {
  return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH ||
         error == EHOSTDOWN || error == ENETDOWN;
}

// What watches over a connection whose other end may vanish without a word.
void watchOver(int socket, const Control::Options& options) {
  const auto set = [socket](int level, int name, int value) {
    setsockopt(socket, level, name, &value, sizeof value);  // a socket that is not TCP has none
  };
  // Counted from the first heartbeat that is not acknowledged, which may be one late.
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
  beat();
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
  watchOver(socket.get(), options_);
  auto link = std::make_shared<Connection>(peer, std::move(socket), state_.size());
  link->proven = proven;
  link->dialled = dialled;
  link->outbox = state_.all();
  try {
    reactor_->watch(link->socket.get(), EPOLLIN | EPOLLOUT,
                    later([link = std::weak_ptr(link)](ControlNode& ring, uint32_t events) {
                      if (const Link there = link.lock()) ring.ready(there, events);
                    }));
  } catch (const Error& error) {
    // As if it had not been made: what cannot be watched would neither be read nor missed.
    if (proven) throw;
    log("lost a control connection with rank " + std::to_string(peer) + ": " + error.what());
    if (dialled) notReached(peer);
    return mend();
  }
  links_.push_back(link);
  // At once, also if there is no news: a connection counts once something has come over it.
  link->out += encode(Heartbeat{});
  send(*link);
  if (link->socket.holdsBytes()) goOn(link);
  mend();
}

// Receives what its system has given already, and so will not tell of again.
void ControlNode::goOn(const Link& link) {
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
  if (link->error != 0 && std::find(links_.begin(), links_.end(), link) != links_.end())
    receive(link);
}

void ControlNode::receive(const Link& link) {
  std::array<std::byte, 16 << 10> bytes;
  for (int i = 0; i < kReadsATurn; ++i) {
    const ssize_t n = link->socket.receive(bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (n <= 0) return lose(link, n < 0 ? errno : 0, n < 0 && errno == EBADMSG);
    link->unheard = 0;
    link->in.feed({bytes.data(), static_cast<size_t>(n)});
    while (const auto frame = link->in.next()) {
      if (!link->proven) {
        link->proven = true;
        not_reached_.clear();
        silent_since_.erase(link->peer);
        mend();
      }
      take(link, *frame);
      if (over_) return;
    }
    if (link->in.failed()) return lose(link, 0, true);
  }
  if (link->socket.holdsBytes()) goOn(link);
}

// Writes what is new to it, as far as its system takes it.
void ControlNode::send(Connection& link) {
  while (link.writable && link.error == 0) {
    if (link.out.empty()) {
      // A stopped process does not read; only what it must know waits for it there.
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
      // What its end said before is still to be read; the reader finds the end.
      link.error = errno;
      reactor_->change(link.socket.get(), EPOLLIN | EPOLLOUT);
    }
  }
}

void ControlNode::sendAll() {
  for (const Link& link : std::vector<Link>(links_)) send(*link);
}

void ControlNode::beat() {
  for (const Link& link : std::vector<Link>(links_)) {
    if (link->out.empty() && link->unheard < kUnheard) {
      ++link->unheard;
      link->out += encode(Heartbeat{});
    }
    send(*link);
  }
  heart_ = reactor_->at(now() + options_.heartbeat, later([](ControlNode& ring) { ring.beat(); }));
}

bool ControlNode::isFlushed() {
  if (over_) return true;
  sendAll();
  const bool gone = state_.departure(me_) == Departure::kGone && !state_.verdict;
  return std::all_of(links_.begin(), links_.end(), [&](const Link& link) {
    if (link->error != 0) return true;
    if (gone && link->needed && ring_.has(link->peer)) return false;
    // Heartbeats are always on their way: what counts is whether the last news has arrived.
    int under_way = 0;
    if (ioctl(link->socket.get(), SIOCOUTQ, &under_way) != 0) under_way = 0;
    return link->out.empty() && link->outbox.empty() &&
           (under_way == 0 || link->sent >= link->last_news + static_cast<uint64_t>(under_way));
  });
}

bool ControlNode::isLinked(int rank) const {
  return rank == me_ || std::any_of(links_.begin(), links_.end(), [&](const Link& link) {
           return link->peer == rank && link->proven;
         });
}

// A connection has ended.
void ControlNode::lose(const Link& link, int error, bool nonsense) {
  reactor_->forget(link->socket.get());
  std::erase(links_, link);
  link->socket.reset();
  if (meansUnreachable(link->error)) error = link->error;
  const int peer = link->peer;
  // A departed rank ends its connections; after a verdict everybody does.
  if (!ring_.has(peer) || state_.verdict) return mend();
  if (!link->proven) {
    if (link->dialled) notReached(peer);
    return mend();
  }
  if (isLinked(peer)) return mend();
  const auto how = nonsense                  ? Broken::How::kNonsense
                   : meansUnreachable(error) ? Broken::How::kUnreachable
                                             : Broken::How::kEnded;
  takeBroken({me_, peer, how}, nullptr);
}

}  // namespace ringreduce::net
