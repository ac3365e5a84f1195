// Streams to and from all ranks, moved by whoever waits.
#include "transport/tcp/tcp_transport.h"

#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "transport/tcp/lane_budget.h"
#include "transport/tcp/lane_count.h"
#include "transport/tcp/stream.h"

namespace ringreduce {

// ---- state
//
// The streams to and from all ranks, connections that other threads pass in, and waiting.

struct TcpTransport::State {
  struct Out {
    Out(net::Pool& pool, const TcpOptions& options)
        : stream(pool), count(options.min_connections, options.max_connections) {}
    net::SendStream stream;
    net::LaneCount count;
    int requested = 0;  // connections, ever
    Nanos next_look = 0;
    bool busy = true;        // had a backlog at every look since the last sample
    uint64_t operation = 0;  // the last one announced there
    bool active = false;
  };
  struct In {
    explicit In(net::Pool& pool) : stream(pool) {}
    net::RecvStream stream;
    OpSignature theirs;
    uint64_t operation = 0;  // the last one in which something was expected
    bool verified = true;
    int expected = 0;  // things expected and not released
    bool active = false;
  };
  struct Arrived {
    int from;
    net::Socket socket;
  };
  struct Made {
    int to, lane;
    net::Socket socket;
    net::NotMade error;
  };

  State(int rank, int size, WaitGuard& guard, net::Dial dial, const TcpOptions& options);

  void ringBell() const {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n =
        write(bell.get(), &one, sizeof one);  // full: it rings already
  }

  Out& out(int r) {
    auto& out = outs[static_cast<size_t>(r)];
    if (!out) out = std::make_unique<Out>(pool, options);
    return *out;
  }
  In& in(int r) {
    auto& in = ins[static_cast<size_t>(r)];
    if (!in) in = std::make_unique<In>(pool);
    return *in;
  }

  // The stream to a rank, on which the operation has been announced.
  Out& announced(int to) {
    Out& o = out(to);
    if (o.operation != operations) {
      o.operation = operations;
      o.stream.send(&operation, sizeof operation);
    }
    if (!o.active) {
      o.active = true;
      sending.push_back(to);
    }
    return o;
  }

  In& expecting(int from) {
    In& i = in(from);
    if (i.operation != operations) {
      i.operation = operations;
      i.verified = false;
      i.stream.expect(&i.theirs, sizeof i.theirs);
    }
    ++i.expected;
    if (!i.active) {
      i.active = true;
      receiving.push_back(from);
    }
    return i;
  }

  // What other threads have left here.
  void collect();
  void add(net::Connection& connection) const;
  static void limitUnsent(Out& o);
  void failedToDial(int to, const net::NotMade& error);

  // Has as many connections made as the stream is to have now.
  void consider(int to, Out& o);
  void request(int to, Out& o, int wanted);
  void request(int to, Out& o);

  // Whether sockets have something new; waits for it no longer than `longest_ms`.
  bool look(int longest_ms);
  // Moves what can be moved; false if nothing could.
  bool progress();

  // A rank that is gone, as whoever waits for it sees it.
  struct Gone {
    Nanos quiet_since = 0;  // 0: it is here
    uint64_t received = 0;
  };
  // Ends the wait for a rank that is gone, once what it sent before has come.
  void lookAfter(int r, Ready ready, Gone& gone);
  // How long a connection may be silent while control connections live.
  Nanos longestSilence() const { return 5 * options.lost_after; }
  void lookForSilence();

  // How long nothing may move before it is asked whether it ever will.
  static constexpr Nanos kIdle = kSecond / 2;

  // Returns once ready() is true; `r` is who must make it so.
  template <class F>
  void until(int r, F&& ready) {
    if (ready()) return;
    Nanos idle_since = 0, next_poll = now() + kLongestSleep;
    Gone gone;
    for (;;) {
      const bool moved = progress();
      if (ready()) return;
      const Nanos time = now();
      if (moved) idle_since = 0;
      if (!moved && idle_since == 0) idle_since = time;
      if (time >= next_poll || guard.failed()) {
        // A rank that was stopped itself may have all that it waits for in its sockets.
        auto drained = [&] {
          while (progress()) {
          }
          return ready();
        };
        guard.poll(r, Ready(drained));
        lookAfter(r, Ready(ready), gone);
        lookForSilence();
        if (idle_since != 0 && time - idle_since >= kIdle) guard.idle(Ready(ready));
        next_poll = now() + kLongestSleep / 2;
      }
      if (moved) {
        look(0);
        continue;
      }
      const Nanos idle = time - idle_since;
      if (idle < patience.spin) {
        look(0);
      } else if (idle < patience.spin + patience.yield) {
        if (!look(0)) sched_yield();
      } else {
        look(static_cast<int>(kLongestSleep / kMillisecond));
      }
    }
  }

  const int rank, size;
  WaitGuard& guard;
  const TcpOptions options;
  Patience patience;
  net::Pool pool;
  Fd epoll, bell;
  std::vector<std::unique_ptr<Out>> outs;  // by rank; null where nothing was sent yet
  std::vector<std::unique_ptr<In>> ins;
  std::vector<int> sending, receiving;  // ranks with something to be moved
  OpSignature operation;
  uint64_t operations = 0;
  std::atomic<uint64_t> taken = 0;  // by all connections, at the end of the last operation
  Nanos next_silence_look = 0;
  net::LaneBudget budget;

  std::mutex mutex;  // of the next two
  std::vector<Arrived> arrived;
  std::vector<Made> made;

  net::Connector dialler;  // the last, since its threads use the above
};

// ---- moving
//
// Streams to and from all ranks, moved by whoever waits.

using net::Connection;
using net::Moved;

namespace {

// A backlog that is worth another look at how many connections carry it.
constexpr uint64_t kBacklog = 1 << 20;
constexpr Nanos kLookEvery = 10 * kMillisecond;
// What a connection beside others may hold that it has not sent: on a short way as much as goes
// while this thread is away; on a long one, where one may be far slower than the others, no more
// than it sends soon, or all would wait for it at the end.
constexpr int kMostUnsentNear = 256 << 10, kMostUnsentFar = 64 << 10;

bool isBbr(const Fd& socket) {
  std::array<char, 16> name{};  // with its end
  socklen_t size = name.size() - 1;
  return getsockopt(socket.get(), IPPROTO_TCP, TCP_CONGESTION, name.data(), &size) == 0 &&
         std::string_view(name.data()).starts_with("bbr");
}

net::LaneCount::Sample sampleOf(net::SendStream& stream) {
  net::LaneCount::Sample sample{.time = now(), .sent = stream.sent(), .lanes = stream.lanes()};
  for (int i = 0; i < stream.lanes(); ++i) {
    tcp_info info{};
    socklen_t size = sizeof info;
    if (getsockopt(stream.lane(i).socket.get(), IPPROTO_TCP, TCP_INFO, &info, &size) != 0) continue;
    // The least that was seen: the smoothed one also counts how long our own bytes queue.
    const Nanos round_trip = static_cast<Nanos>(info.tcpi_min_rtt) * kMicrosecond;
    sample.round_trip = i == 0 ? round_trip : std::min(sample.round_trip, round_trip);
    sample.retransmits += info.tcpi_total_retrans;
    if (i == 0) sample.fills = isBbr(stream.lane(i).socket);
  }
  return sample;
}

}  // namespace

TcpTransport::State::State(int rank_, int size_, WaitGuard& guard_, net::Dial dial,
                           const TcpOptions& options_)
    : rank(rank_),
      size(size_),
      guard(guard_),
      options(options_),
      epoll(epoll_create1(EPOLL_CLOEXEC)),
      bell(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      outs(static_cast<size_t>(size_)),
      ins(static_cast<size_t>(size_)),
      dialler(std::move(dial)) {
  if (!epoll || !bell) throwErrno(Failure::kSetup, "no descriptors are left for a group's sockets");
  epoll_event event{.events = EPOLLIN, .data = {.ptr = nullptr}};
  epoll_ctl(epoll.get(), EPOLL_CTL_ADD, bell.get(), &event);
}

void TcpTransport::State::add(Connection& connection) const {
  epoll_event event{.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET,
                    .data = {.ptr = &connection}};
  if (epoll_ctl(epoll.get(), EPOLL_CTL_ADD, connection.socket.get(), &event) != 0)
    throwErrno(Failure::kSetup, "a connection cannot be watched");
}

void TcpTransport::State::collect() {
  uint64_t rings = 0;
  [[maybe_unused]] const ssize_t n = ::read(bell.get(), &rings, sizeof rings);
  std::vector<Arrived> new_arrived;
  std::vector<Made> new_made;
  {
    const std::lock_guard lock(mutex);
    new_arrived.swap(arrived);
    new_made.swap(made);
  }
  for (Arrived& one : new_arrived) {
    net::RecvStream& stream = in(one.from).stream;
    if (stream.openLanes() >= kMaxConnections) continue;  // no rank makes as many
    net::askNowAndThen(one.socket, longestSilence());
    stream.add(std::move(one.socket));
    add(stream.lane(stream.lanes() - 1));
  }
  for (Made& one : new_made) {
    Out& o = out(one.to);
    if (!one.error.why.empty()) failedToDial(one.to, one.error);
    if (!one.socket) continue;
    add(o.stream.add(std::move(one.socket), one.lane));
    limitUnsent(o);
  }
}

// So that bytes wait here, where any connection may take them, and not in one that is slow.  One
// that is alone is to have enough for as long as this thread is away.
void TcpTransport::State::limitUnsent(Out& o) {
  net::SendStream& stream = o.stream;
  const int bytes = stream.used() == 1    ? -1
                    : o.count.isLongWay() ? kMostUnsentFar
                                          : kMostUnsentNear;
  for (int i = 0; i < stream.lanes(); ++i)
    setsockopt(stream.lane(i).socket.get(), IPPROTO_TCP, TCP_NOTSENT_LOWAT, &bytes, sizeof bytes);
}

void TcpTransport::State::failedToDial(int to, const net::NotMade& error) {
  // One more connection is not to be had: those that there are do.
  Out& o = out(to);
  if (o.stream.lanes() > 0) return o.count.limit(o.stream.lanes());
  guard.broken(error.own ? rank : to, error.why);
}

bool TcpTransport::State::look(int longest_ms) {
  std::array<epoll_event, 64> events;
  const int n = epoll_wait(epoll.get(), events.data(), static_cast<int>(events.size()), longest_ms);
  bool rung = false;
  for (int i = 0; i < n; ++i) {
    auto* connection = static_cast<Connection*>(events[static_cast<size_t>(i)].data.ptr);
    if (!connection) {
      rung = true;
      continue;
    }
    connection->ready = true;
    if (events[static_cast<size_t>(i)].events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR))
      connection->hangup = true;
  }
  if (rung) collect();
  return n > 0;
}

// One in any case, more where the process may have them.
void TcpTransport::State::request(int to, Out& o, int wanted) {
  while (o.requested < wanted && (o.requested == 0 || budget.take())) request(to, o);
  if (o.requested < wanted) o.count.limit(o.requested);
}

void TcpTransport::State::request(int to, Out& o) {
  const int lane = o.requested++;
  dialler.call(to, lane, [this, to, lane](net::Socket socket, const net::NotMade& error) {
    const std::lock_guard lock(mutex);
    made.push_back({to, lane, std::move(socket), error});
    ringBell();
  });
}

void TcpTransport::State::consider(int to, Out& o) {
  if (o.requested == 0) return request(to, o, options.min_connections);
  o.busy = o.busy && o.stream.unsent() >= kBacklog;
  if (o.stream.lanes() == 0 || now() < o.next_look) return;
  o.next_look = now() + kLookEvery;
  const int wanted = o.count.look(sampleOf(o.stream), o.busy);
  o.busy = true;
  request(to, o, wanted);
  if (const int before = o.stream.used(); o.stream.use(wanted), o.stream.used() < before)
    limitUnsent(o);
}

bool TcpTransport::State::progress() {
  bool moved = false;
  for (size_t i = 0; i < receiving.size(); ++i) {
    const int from = receiving[i];
    net::RecvStream& stream = in(from).stream;
    const Moved what = stream.progress();
    if (what == Moved::kBroken) guard.broken(from, stream.why());
    moved = moved || what == Moved::kSome;
  }
  for (size_t i = 0; i < sending.size();) {
    const int to = sending[i];
    Out& o = out(to);
    consider(to, o);
    const Moved what = o.stream.progress();
    if (what == Moved::kBroken) guard.broken(to, o.stream.why());
    moved = moved || what == Moved::kSome;
    if (o.stream.idle()) {
      o.active = false;
      sending[i] = sending.back();
      sending.pop_back();
    } else {
      ++i;
    }
  }
  return moved;
}

// Looks for connections that nothing gets through any more, of all ranks: what one of them misses
// may be what another waits for.
void TcpTransport::State::lookForSilence() {
  const Nanos time = now();
  if (time < next_silence_look) return;
  next_silence_look = time + longestSilence() / 8;
  for (int r = 0; r < size; ++r) {
    const auto& one = outs[static_cast<size_t>(r)];
    for (int i = 0; one && i < one->stream.lanes(); ++i) {
      Connection& lane = one->stream.lane(i);
      const Nanos silent = lane.silence.look(lane.socket);
      if (silent <= longestSilence() || guard.stateOf(r) != PeerState::kHere) continue;
      guard.broken(r, "nothing that was sent " + net::wayOf(lane.socket) + " has arrived for " +
                          std::to_string(silent / kSecond) +
                          " s, while its control connection lives: something between these two "
                          "addresses drops packets");
    }
  }
}

// Its system goes on sending what is left, for as long as it takes.
void TcpTransport::State::lookAfter(int r, Ready ready, Gone& gone) {
  const PeerState fate = guard.stateOf(r);
  if (fate == PeerState::kHere) return;
  collect();
  while (progress()) {
  }
  if (ready()) return;
  const net::RecvStream& stream = in(r).stream;
  if (gone.quiet_since == 0 || gone.received != stream.received())
    gone = {.quiet_since = now(), .received = stream.received()};
  if (fate == PeerState::kUnreachable || !stream.isOpen() ||
      now() - gone.quiet_since > 2 * options.lost_after)
    guard.broken(r, "it is gone");
}

// ---- what users call
//
// What a transport's users call.

namespace {

// Bytes of buffers that are kept from one operation to the next.
constexpr size_t kKeptBuffers = 64 << 20;

}  // namespace

TcpTransport::TcpTransport(int rank, int size, WaitGuard& guard, net::Dial dial,
                           const TransportOptions& options, const TcpOptions& tcp)
    : Transport(rank, size, guard, options),
      state_(std::make_unique<State>(rank, size, guard, std::move(dial), tcp)) {}

TcpTransport::~TcpTransport() = default;

void TcpTransport::setPatience(Patience patience) {
  state_->patience = patience;
}

void TcpTransport::accept(int from, net::Socket socket) {
  const std::lock_guard lock(state_->mutex);
  std::vector<State::Arrived>& arrived = state_->arrived;
  if (std::ranges::count(arrived, from, &State::Arrived::from) >= kMaxConnections) return;
  arrived.push_back({from, std::move(socket)});
  state_->ringBell();
}

void TcpTransport::begin(const OpSignature& operation) {
  scratch_.reset();
  ++state_->operations;
  // It travels as it lies in memory, with no stray bytes between its fields.
  std::memset(static_cast<void*>(&state_->operation), 0, sizeof operation);
  OpSignature& own = state_->operation;
  own.sequence = operation.sequence;
  own.count = operation.count;
  own.history = operation.history;
  own.kind = operation.kind;
  own.dtype = operation.dtype;
  own.op = operation.op;
  own.root = operation.root;
  own.parts = operation.parts;
}

void TcpTransport::advance() {
  state_->look(0);
  state_->progress();
}

void TcpTransport::finish() {
  while (!state_->sending.empty()) {
    const int to = state_->sending.front();
    state_->until(to, [&] { return state_->out(to).stream.idle(); });
    state_->progress();  // takes those that are done from the list
  }
  state_->pool.trim(kKeptBuffers);
  uint64_t taken = 0;
  for (const auto& out : state_->outs)
    if (out) taken += out->stream.taken();
  state_->taken.store(taken, std::memory_order_relaxed);
}

uint64_t TcpTransport::bytesSent() const {
  return state_->taken.load(std::memory_order_relaxed);
}

void TcpTransport::send(int to, const void* data, size_t bytes) {
  state_->announced(to).stream.send(data, bytes);
}

std::byte* TcpTransport::acquire(int to) {
  if (auto& out = state_->out(to); out.stream.buffersUnderWay() >= kWindow)
    state_->until(to, [&] { return out.stream.buffersUnderWay() < kWindow; });
  return state_->pool.take();
}

void TcpTransport::post(int to, std::byte* buffer, size_t bytes) {
  state_->announced(to).stream.sendBuffer(buffer, bytes);
}

void TcpTransport::expect(int from, void* data, size_t bytes) {
  state_->expecting(from).stream.expect(data, bytes);
}

void TcpTransport::expect(int from, size_t bytes) {
  state_->expecting(from).stream.expect(nullptr, bytes);
}

const std::byte* TcpTransport::peek(int from) {
  State::In& in = state_->in(from);
  if (!in.verified) {
    state_->until(from, [&] { return in.stream.ready(); });
    in.stream.pop();
    if (!isSound(in.theirs, state_->size))
      state_->guard.broken(from, "it announced what no rank would");
    in.verified = true;
    state_->guard.verify(from, in.theirs);
  }
  state_->until(from, [&] { return in.stream.ready(); });
  return in.stream.front();
}

void TcpTransport::release(int from) {
  State::In& in = state_->in(from);
  in.stream.pop();
  if (--in.expected > 0) return;
  in.active = false;
  std::erase(state_->receiving, from);
}

void TcpTransport::leave(Nanos longest) {
  const auto everyLane = [&](const auto& body) {
    for (int r = 0; r < state_->size; ++r)
      if (const auto& out = state_->outs[static_cast<size_t>(r)])
        for (int i = 0; i < out->stream.lanes(); ++i) body(r, out->stream.lane(i).socket.get());
  };
  const auto isUnderWay = [&] {
    bool under_way = false;
    everyLane([&](int r, int socket) {
      int bytes = 0;
      under_way = under_way || (state_->guard.stateOf(r) == PeerState::kHere &&
                                ioctl(socket, SIOCOUTQ, &bytes) == 0 && bytes > 0);
    });
    return under_way;
  };
  Nanos nap = 100 * kMicrosecond;
  for (const Nanos limit = deadlineIn(longest);
       now() < limit && !state_->guard.failed() && isUnderWay();
       nap = std::min(2 * nap, 5 * kMillisecond))
    std::this_thread::sleep_for(std::chrono::nanoseconds(nap));
  everyLane([](int, int socket) { shutdown(socket, SHUT_WR); });
}

size_t TcpTransport::stagingBytes() const {
  return state_->pool.bytes();
}

std::vector<std::string> TcpTransport::routes() const {
  std::vector<std::string> all;
  for (int r = 0; r < state_->size; ++r)
    if (const auto& out = state_->outs[static_cast<size_t>(r)]; out && out->requested > 0)
      all.push_back("to rank " +
                    std::to_string(state_->options.shown.empty()
                                       ? r
                                       : state_->options.shown[static_cast<size_t>(r)]) +
                    ": " + out->count.why());
  return all;
}

}  // namespace ringreduce
