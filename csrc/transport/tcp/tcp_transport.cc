// Streams to and from all ranks, moved by the thread that waits.
#include "transport/tcp/tcp_transport.h"

#include <fcntl.h>
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
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/limits.h"
#include "transport/tcp/stream.h"

namespace ringreduce {

using net::Connection;
using net::Moved;

struct TcpTransport::State {
  struct Out {
    Out(net::Pool& pool, const TcpOptions& options)
        : stream(pool), count(options.min_connections, options.max_connections) {}
    net::SendStream stream;
    net::ConnectionCount count;
    net::Pace pace;
    uint64_t pace_each = 0;     // bytes a second of each connection,
    int paced_connections = 0;  // of so many
    uint64_t paced_operation = 0;
    bool in_memory = false;
    int requested = 0;  // connections, ever,
    int failed = 0;     // and those of them that could not be made
    Nanos next_look = 0;
    std::string left_bbr;  // BBR's name, if a connection has left it
    bool is_lossy = false;
    net::ConnectionCount::Sample loss_since;  // where the count of losses began
    bool busy = true;                         // had a backlog at every look since the last sample
    uint64_t operation = 0;                   // the last one whose opening was sent
    bool active = false;
  };
  struct In {
    explicit In(net::Pool& pool) : stream(pool) {}
    net::RecvStream stream;
    bool in_memory = false;
    Opening theirs;
    uint64_t operation = 0;  // the last one in which something was expected
    bool verified = true;
    int expected = 0;  // expectations that were not released
    bool active = false;
  };
  // Passed in by other threads.
  struct Accepted {
    int from;
    net::Socket socket;
  };
  struct Dialled {
    int to, number;
    net::Socket socket;
    net::ConnectFailure error;
  };
  // A lost rank, as the thread that waits for it sees it.
  struct LostPeer {
    Nanos quiet_since = 0;  // 0: the rank is not lost
    uint64_t received = 0;
  };

  State(int rank, int size, WaitGuard& guard, net::Dial dial, const TcpOptions& options,
        std::unique_ptr<Neighbours> neighbours);

  Out& out(int r) { return made(outs[static_cast<size_t>(r)], r, pool, options); }
  In& in(int r) { return made(ins[static_cast<size_t>(r)], r, pool); }
  // The stream of rank r, with its pipe if there is one.
  template <class End, class... Args>
  End& made(std::unique_ptr<End>& end, int r, Args&... args) {
    if (end) return *end;
    end = std::make_unique<End>(args...);
    next_look_at_lines = 0;
    if (BytePipe* pipe = neighbours ? neighbours->pipe(r) : nullptr) {
      end->stream.add(*pipe);
      end->in_memory = true;
    }
    return *end;
  }
  Out& announced(int to);
  In& expecting(int from);

  // ---- connections
  void wake() const;
  void collect();
  void watch(Connection& connection) const;
  static void limitUnsent(Out& o);
  void dialFailed(int to, const net::ConnectFailure& error);
  void adaptConnections(int to, Out& o);
  static void setPace(Out& o);
  int flows();
  bool chooseCongestionControl(Out& o, const net::ConnectionCount::Sample& sample);
  void request(int to, Out& o, int wanted);
  void request(int to, Out& o);

  void lookAtLines();

  // ---- waiting
  bool progress();
  bool pollSockets(int longest_ms);
  void sleep();
  void waitUntil(int r, Ready ready);
  void checkPeers(int r, Ready ready, LostPeer& lost);
  void throwIfLost(int r, Ready ready, LostPeer& lost);
  void throwIfSilent();
  void backOff(Nanos idle);

  // How long a connection may be silent while the control connections live.
  Nanos longestSilence() const { return 5 * options.lost_after; }

  const int rank, size;
  WaitGuard& guard;
  const TcpOptions options;
  Patience patience;
  uint64_t line_rate = 0;  // bytes a second that the line carries at least; 0: not known
  net::Pool pool;
  const std::unique_ptr<Neighbours> neighbours;  // null: there are none
  Fd epoll, wakeup;                              // the neighbours' doorbell wakes up too
  std::vector<std::unique_ptr<Out>> outs;        // by rank; null until something is sent
  std::vector<std::unique_ptr<In>> ins;
  std::vector<int> sending, receiving;  // ranks with bytes to move
  Opening operation;
  uint64_t operations = 0;
  std::atomic<uint64_t> taken = 0;  // by all connections, at the end of the last operation
  Nanos next_silence_look = 0, next_look_at_lines = 0;
  net::ConnectionBudget budget;

  std::mutex mutex;  // of the next four
  std::vector<Accepted> accepted;
  std::vector<Dialled> dialled;
  std::vector<Line> lines;
  std::vector<std::string> routes;

  net::Connector connector;  // last: its threads use the members above
};

namespace {

// A backlog from which the number of connections is reconsidered.
constexpr uint64_t kBacklog = 1 << 20;
// A look at a line costs about a microsecond a connection.
constexpr Nanos kLookAtLinesEvery = 20 * kMillisecond;
// A path is lossy if it loses this many packets within this many bytes.  One or two retransmissions
// happen without loss, when the receiver computes and reads late.
constexpr uint64_t kManyLosses = 8;
// Limits of unsent bytes in a socket that shares a stream.  On a short path: enough until this
// thread is back.  On a long path, where one connection may be far slower than the others: no more
// than it sends soon, or all would wait for it at the end.
constexpr int kMostUnsentNear = 256 << 10, kMostUnsentFar = 64 << 10;
// Bytes of buffers that are kept from one operation to the next.
constexpr size_t kKeptBuffers = 64 << 20;

std::string congestionControlOf(const Fd& socket) {
  std::array<char, 16> name{};  // with the terminating zero
  socklen_t size = name.size() - 1;
  if (getsockopt(socket.get(), IPPROTO_TCP, TCP_CONGESTION, name.data(), &size) != 0) return {};
  return name.data();
}

bool isBbr(std::string_view name) {
  return name.starts_with("bbr");
}

bool setCongestionControl(const Fd& socket, std::string_view name) {
  return setsockopt(socket.get(), IPPROTO_TCP, TCP_CONGESTION, name.data(),
                    static_cast<socklen_t>(name.size())) == 0;
}

// Zeros if the socket does not tell.
tcp_info infoOf(const net::Socket& socket) {
  tcp_info info{};
  socklen_t size = sizeof info;
  getsockopt(socket.get(), IPPROTO_TCP, TCP_INFO, &info, &size);
  return info;
}

net::ConnectionCount::Sample sampleOf(net::SendStream& stream) {
  net::ConnectionCount::Sample sample{
      .time = now(), .sent = stream.sent(), .connections = stream.connections()};
  for (int i = 0; i < stream.connections(); ++i) {
    const Connection& connection = stream.connection(i);
    const tcp_info info = infoOf(connection.socket);
    if (info.tcpi_unacked > 0) {
      const Nanos smoothed = static_cast<Nanos>(info.tcpi_rtt) * kMicrosecond;
      sample.smoothed = sample.smoothed == 0 ? smoothed : std::min(sample.smoothed, smoothed);
    }
    // The minimum: the smoothed round trip includes the time that our own bytes queue.  Not of
    // connections that are put aside, which would keep that of a route of before.
    const Nanos round_trip = static_cast<Nanos>(info.tcpi_min_rtt) * kMicrosecond;
    if (i < stream.used())
      sample.round_trip = i == 0 ? round_trip : std::min(sample.round_trip, round_trip);
    sample.retransmits += info.tcpi_total_retrans;
    if (i == 0) sample.bbr = isBbr(congestionControlOf(connection.socket));
  }
  return sample;
}

}  // namespace

TcpTransport::State::State(int rank_, int size_, WaitGuard& guard_, net::Dial dial,
                           const TcpOptions& options_, std::unique_ptr<Neighbours> neighbours_)
    : rank(rank_),
      size(size_),
      guard(guard_),
      options(options_),
      neighbours(std::move(neighbours_)),
      epoll(epoll_create1(EPOLL_CLOEXEC)),
      wakeup(neighbours ? fcntl(neighbours->doorbell(), F_DUPFD_CLOEXEC, 0)
                        : eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      outs(static_cast<size_t>(size_)),
      ins(static_cast<size_t>(size_)),
      connector(std::move(dial)) {
  if (!epoll || !wakeup)
    throwErrno(Failure::kSetup, "no descriptors are left for a group's sockets");
  epoll_event event{.events = EPOLLIN, .data = {.ptr = nullptr}};
  epoll_ctl(epoll.get(), EPOLL_CTL_ADD, wakeup.get(), &event);
}

// The stream to a rank, after the opening of the operation.
TcpTransport::State::Out& TcpTransport::State::announced(int to) {
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

TcpTransport::State::In& TcpTransport::State::expecting(int from) {
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

void TcpTransport::State::lookAtLines() {
  const Nanos time = now();
  if (time < next_look_at_lines) return;
  next_look_at_lines = time + kLookAtLinesEvery;
  std::vector<Line> looked;
  std::vector<std::string> ways;
  for (int r = 0; r < size; ++r) {
    const auto& out = outs[static_cast<size_t>(r)];
    if (!out || (!out->in_memory && out->requested == 0)) continue;
    const int shown = options.shown.empty() ? r : options.shown[static_cast<size_t>(r)];
    ways.push_back("to rank " + std::to_string(shown) + ": " +
                   (out->in_memory ? "shared memory" : out->count.why()));
    if (out->stream.connections() == 0 || out->in_memory) continue;
    Line line{.to = shown};
    for (int i = 0; i < out->stream.connections(); ++i) {
      const tcp_info info = infoOf(out->stream.connection(i).socket);
      line.bytes += info.tcpi_bytes_acked;
      line.retransmits += info.tcpi_total_retrans;
      const uint64_t busy =
          info.tcpi_busy_time - std::min(info.tcpi_busy_time, info.tcpi_rwnd_limited);
      // Connections of a line are busy at the same time.
      line.busy = std::max(line.busy, static_cast<Nanos>(busy) * kMicrosecond);
    }
    looked.push_back(line);
  }
  const std::lock_guard lock(mutex);
  lines.swap(looked);
  routes.swap(ways);
}

// ---- connections

void TcpTransport::State::wake() const {
  const uint64_t one = 1;
  // Fails only if the counter is full; then the thread wakes up anyway.
  [[maybe_unused]] const ssize_t n = write(wakeup.get(), &one, sizeof one);
}

// Takes the connections that other threads have passed in.
void TcpTransport::State::collect() {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t n = ::read(wakeup.get(), &count, sizeof count);
  std::vector<Accepted> new_accepted;
  std::vector<Dialled> new_dialled;
  {
    const std::lock_guard lock(mutex);
    new_accepted.swap(accepted);
    new_dialled.swap(dialled);
  }
  for (Accepted& one : new_accepted) {
    net::RecvStream& stream = in(one.from).stream;
    if (stream.openConnections() >= kMaxConnections) continue;  // no rank makes as many
    net::probeWhenIdle(one.socket, longestSilence());
    stream.add(std::move(one.socket));
    watch(stream.connection(stream.connections() - 1));
  }
  for (Dialled& one : new_dialled) {
    Out& o = out(one.to);
    if (!one.error.why.empty()) dialFailed(one.to, one.error);
    if (!one.socket) continue;
    watch(o.stream.add(std::move(one.socket), one.number));
    limitUnsent(o);
  }
}

void TcpTransport::State::watch(Connection& connection) const {
  epoll_event event{.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET,
                    .data = {.ptr = &connection}};
  if (epoll_ctl(epoll.get(), EPOLL_CTL_ADD, connection.socket.get(), &event) != 0)
    throwErrno(Failure::kSetup, "a connection cannot be watched");
}

// Limits the unsent bytes in each socket, so that a slow connection does not hold bytes that a
// faster one could send.  A single connection has no limit, so that it has bytes to send while this
// thread computes.
void TcpTransport::State::limitUnsent(Out& o) {
  net::SendStream& stream = o.stream;
  const int bytes = stream.used() == 1     ? -1
                    : o.count.isLongPath() ? kMostUnsentFar
                                           : kMostUnsentNear;
  for (int i = 0; i < stream.connections(); ++i)
    setsockopt(stream.connection(i).socket.get(), IPPROTO_TCP, TCP_NOTSENT_LOWAT, &bytes,
               sizeof bytes);
}

// One connection is needed, whichever; others are optional.
void TcpTransport::State::dialFailed(int to, const net::ConnectFailure& error) {
  Out& o = out(to);
  if (++o.failed < o.requested) return o.count.limit(o.requested - o.failed);
  guard.broken(error.own ? rank : to, error.why);
}

// Adapts the number of connections to the stream's speed.
void TcpTransport::State::adaptConnections(int to, Out& o) {
  if (o.requested == 0) return request(to, o, options.min_connections);
  if (std::exchange(o.paced_operation, operations) != operations) setPace(o);
  o.busy = o.busy && o.stream.unsent() >= kBacklog;
  if (o.stream.connections() == 0 || now() < o.next_look) return;
  o.next_look = now() + net::kLookEvery;
  net::ConnectionCount::Sample sample = sampleOf(o.stream);
  if (options.leaves_bbr) sample.bbr = chooseCongestionControl(o, sample);
  sample.pace = o.pace.look(sample, static_cast<double>(line_rate) / flows());
  setPace(o);
  const bool was_long = o.count.isLongPath();
  const int wanted = o.count.look(sample, o.busy);
  o.busy = true;
  request(to, o, wanted);
  const int before = o.stream.used();
  o.stream.use(wanted);
  if (o.stream.used() < before || o.count.isLongPath() != was_long) limitUnsent(o);
}

// The kernel paces without privilege and without a qdisc.  Connections that have no frame to send
// leave their part to the others.
void TcpTransport::State::setPace(Out& o) {
  const uint64_t frames = std::max<uint64_t>(1, o.stream.unsent() / kMostUnsentFar);
  const auto senders =
      std::min<uint64_t>(frames, static_cast<uint64_t>(std::max(1, o.stream.used())));
  const auto each = static_cast<uint64_t>(o.pace.rate()) / senders;
  if (each == o.pace_each && (each == 0 || o.stream.connections() == o.paced_connections)) return;
  o.pace_each = each;
  o.paced_connections = o.stream.connections();
  const uint64_t most = each == 0 ? ~uint64_t{0} : each;
  for (int i = 0; i < o.stream.connections(); ++i)
    setsockopt(o.stream.connection(i).socket.get(), SOL_SOCKET, SO_MAX_PACING_RATE, &most,
               sizeof most);
}

// Streams that send on long paths now, at least 1.
int TcpTransport::State::flows() {
  const auto sends = [&](int to) { return !out(to).in_memory && out(to).count.isLongPath(); };
  return std::max(1, static_cast<int>(std::ranges::count_if(sending, sends)));
}

// Takes another congestion control than BBR on a short path that loses few packets.  Returns
// whether the stream has BBR.
//
// BBR paces a connection by the rate at which acknowledgements return.  On a short path that is
// busy both ways they queue behind the data of the other direction, and BBR takes that for a slower
// path.  A control that reacts to loss keeps a deep queue full.  Where packets are lost, in a
// shallow queue or otherwise, BBR is faster, so the stream takes it again and keeps it.  The kernel
// allows Reno to every process.
bool TcpTransport::State::chooseCongestionControl(Out& o,
                                                  const net::ConnectionCount::Sample& sample) {
  if (sample.round_trip == 0 || sample.round_trip >= net::kLongPath) return sample.bbr;
  o.is_lossy = o.is_lossy || sample.retransmits >= o.loss_since.retransmits + kManyLosses;
  if (sample.sent - o.loss_since.sent > net::kLossBytes) o.loss_since = sample;
  bool has_bbr = sample.bbr;
  for (int i = 0; i < o.stream.connections(); ++i) {
    const Fd& socket = o.stream.connection(i).socket;
    const std::string name = congestionControlOf(socket);
    if (o.is_lossy && !o.left_bbr.empty() && !isBbr(name)) {
      has_bbr = setCongestionControl(socket, o.left_bbr);
    } else if (!o.is_lossy && isBbr(name)) {
      o.left_bbr = name;
      has_bbr = !setCongestionControl(socket, "cubic") && !setCongestionControl(socket, "reno");
    }
  }
  return has_bbr;
}

// The first connection in any case, more as far as the process may have them.
void TcpTransport::State::request(int to, Out& o, int wanted) {
  while (o.requested < wanted && (o.requested == 0 || budget.take())) request(to, o);
  if (o.requested < wanted) o.count.limit(o.requested - o.failed);
}

void TcpTransport::State::request(int to, Out& o) {
  const int number = o.requested++;
  connector.call(to, number,
                 [this, to, number](net::Socket socket, const net::ConnectFailure& error) {
                   const std::lock_guard lock(mutex);
                   dialled.push_back({to, number, std::move(socket), error});
                   wake();
                 });
}

// ---- waiting

// Moves as many bytes as possible; false if none.
bool TcpTransport::State::progress() {
  bool moved = false;
  for (size_t i = 0; i < receiving.size(); ++i) {
    const int from = receiving[i];
    net::RecvStream& stream = in(from).stream;
    const Moved result = stream.progress();
    if (result == Moved::kBroken) guard.broken(from, stream.why());
    moved = moved || result == Moved::kSome;
  }
  for (size_t i = 0; i < sending.size();) {
    const int to = sending[i];
    Out& o = out(to);
    if (!o.in_memory) adaptConnections(to, o);
    const Moved result = o.stream.progress();
    if (result == Moved::kBroken) guard.broken(to, o.stream.why());
    moved = moved || result == Moved::kSome;
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

// Marks the connections for which epoll reports something, waiting up to `longest_ms` for it. False
// if there is none.
bool TcpTransport::State::pollSockets(int longest_ms) {
  std::array<epoll_event, 64> events;
  const int n = epoll_wait(epoll.get(), events.data(), static_cast<int>(events.size()), longest_ms);
  bool woken = false;
  for (int i = 0; i < n; ++i) {
    const epoll_event& event = events[static_cast<size_t>(i)];
    auto* connection = static_cast<Connection*>(event.data.ptr);
    if (!connection) {
      woken = true;
      continue;
    }
    connection->ready = true;
    if (event.events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) connection->hangup = true;
  }
  if (woken) collect();
  return n > 0;
}

// Waits until ready() is true; rank r must make it so.
void TcpTransport::State::waitUntil(int r, const Ready ready) {
  if (ready()) return;
  Nanos idle_since = 0;  // 0: something moved
  Nanos next_check = now() + kLongestSleep;
  LostPeer lost;
  for (;;) {
    const bool moved = progress();
    if (ready()) return;
    const Nanos time = now();
    if (moved)
      idle_since = 0;
    else if (idle_since == 0)
      idle_since = time;
    if (time >= next_check || guard.failed()) {
      checkPeers(r, ready, lost);
      if (idle_since != 0 && time - idle_since >= limits::kIdle) guard.idle(ready);
      next_check = now() + kLongestSleep / 2;
    }
    if (moved)
      pollSockets(0);
    else
      backOff(time - idle_since);
  }
}

// Throws if the group has failed, or the wait cannot end.
void TcpTransport::State::checkPeers(int r, const Ready ready, LostPeer& lost) {
  // If this process was stopped, all that it waits for may be in its sockets already.
  auto ready_after_draining = [&] {
    while (progress()) {
    }
    return ready();
  };
  guard.poll(r, Ready(ready_after_draining));
  throwIfLost(r, ready, lost);
  throwIfSilent();
}

// Throws if rank r is lost and no more of its bytes arrive.  The kernel of a lost rank may still
// send bytes that the rank had written.
void TcpTransport::State::throwIfLost(int r, const Ready ready, LostPeer& lost) {
  const PeerState state = guard.stateOf(r);
  if (state.isHere()) return;
  collect();
  while (progress()) {
  }
  if (ready()) return;
  // All that it wrote to a pipe was there.
  const net::RecvStream& stream = in(r).stream;
  if (lost.quiet_since == 0 || lost.received != stream.received())
    lost = {.quiet_since = now(), .received = stream.received()};
  if (state.observed == Observed::kUnreachable || in(r).in_memory || !stream.isOpen() ||
      now() - lost.quiet_since > 2 * options.lost_after)
    guard.broken(r, "it is gone");
}

// Throws if a connection is dead.  Looks at those to all ranks: the rank that is awaited may itself
// wait for bytes from a dead connection of this one.
void TcpTransport::State::throwIfSilent() {
  const Nanos time = now();
  if (time < next_silence_look) return;
  next_silence_look = time + longestSilence() / 8;
  for (int r = 0; r < size; ++r) {
    const auto& o = outs[static_cast<size_t>(r)];
    for (int i = 0; o && !o->in_memory && i < o->stream.connections(); ++i) {
      Connection& connection = o->stream.connection(i);
      const Nanos silent = connection.silence.look(connection.socket);
      if (silent <= longestSilence() || !guard.stateOf(r).isHere()) continue;
      guard.broken(r, "nothing that was sent " + net::routeOf(connection.socket) +
                          " has arrived for " + std::to_string(silent / kSecond) +
                          " s, while its control connection lives: something between these two "
                          "addresses drops packets");
    }
  }
}

// Spins, then yields, then sleeps, after `idle` of time in which nothing moved.
void TcpTransport::State::backOff(Nanos idle) {
  if (idle < patience.spin) {
    pollSockets(0);
  } else if (idle < patience.spin + patience.yield) {
    if (!pollSockets(0)) sched_yield();
  } else {
    sleep();
  }
}

// A neighbour rings only while this rank listens, so what it moved before is looked for once more.
void TcpTransport::State::sleep() {
  if (neighbours) neighbours->listen(true);
  if (!neighbours || !progress()) pollSockets(static_cast<int>(kLongestSleep / kMillisecond));
  if (neighbours) neighbours->listen(false);
}

// ---- the interface

TcpTransport::TcpTransport(int rank, int size, WaitGuard& guard, net::Dial dial,
                           const TcpOptions& options, std::unique_ptr<Neighbours> neighbours)
    : Transport(rank, size),
      state_(std::make_unique<State>(rank, size, guard, std::move(dial), options,
                                     std::move(neighbours))) {}

TcpTransport::~TcpTransport() = default;

void TcpTransport::setLineRate(uint64_t rate) {
  state_->line_rate = rate;
}

void TcpTransport::setPatience(Patience patience) {
  state_->patience = patience;
}

void TcpTransport::accept(int from, net::Socket socket) {
  const std::lock_guard lock(state_->mutex);
  std::vector<State::Accepted>& accepted = state_->accepted;
  if (std::ranges::count(accepted, from, &State::Accepted::from) >= kMaxConnections) return;
  accepted.push_back({from, std::move(socket)});
  state_->wake();
}

void TcpTransport::open(const Opening& operation) {
  ++state_->operations;
  state_->operation = operation;
}

void TcpTransport::advance() {
  state_->pollSockets(0);
  state_->progress();
}

void TcpTransport::finish() {
  while (!state_->sending.empty()) {
    const int to = state_->sending.front();
    auto sent = [&] { return state_->out(to).stream.idle(); };
    state_->waitUntil(to, Ready(sent));
    state_->progress();  // removes idle streams from `sending`
  }
  state_->pool.trim(kKeptBuffers);
  uint64_t taken = 0;
  for (const auto& out : state_->outs)
    if (out && !out->in_memory) taken += out->stream.taken();
  state_->taken.store(taken, std::memory_order_relaxed);
  state_->lookAtLines();
}

uint64_t TcpTransport::bytesSent() const {
  return state_->taken.load(std::memory_order_relaxed);
}

void TcpTransport::send(int to, const void* data, size_t bytes) {
  state_->announced(to).stream.send(data, bytes);
}

std::byte* TcpTransport::acquire(int to) {
  net::SendStream& stream = state_->out(to).stream;
  auto has_room = [&] { return stream.buffersInFlight() < kWindow; };
  state_->waitUntil(to, Ready(has_room));
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
  auto arrived = [&] { return in.stream.ready(); };
  if (!in.verified) {
    state_->waitUntil(from, Ready(arrived));
    in.stream.pop();
    if (!isSound(in.theirs, state_->size))
      state_->guard.broken(from, "it announced what no rank would");
    in.verified = true;
    state_->guard.verify(from, in.theirs);
    hear(in.theirs);
  }
  state_->waitUntil(from, Ready(arrived));
  return in.stream.front();
}

void TcpTransport::release(int from) {
  State::In& in = state_->in(from);
  in.stream.pop();
  if (--in.expected > 0) return;
  in.active = false;
  std::erase(state_->receiving, from);
}

uint64_t TcpTransport::arrived() {
  state_->collect();
  uint64_t bytes = 0;
  for (const auto& in : state_->ins)
    if (in && !in->in_memory) bytes += in->stream.arrived();
  return bytes;
}

void TcpTransport::leave(Nanos longest) {
  const auto forEachConnection = [&](const auto& body) {
    for (int r = 0; r < state_->size; ++r)
      if (const auto& out = state_->outs[static_cast<size_t>(r)]; out && !out->in_memory)
        for (int i = 0; i < out->stream.connections(); ++i)
          body(r, out->stream.connection(i).socket.get());
  };
  const auto isInFlight = [&] {
    bool in_flight = false;
    forEachConnection([&](int r, int socket) {
      int bytes = 0;
      in_flight = in_flight || (state_->guard.stateOf(r).isHere() &&
                                ioctl(socket, SIOCOUTQ, &bytes) == 0 && bytes > 0);
    });
    return in_flight;
  };
  Nanos nap = 100 * kMicrosecond;
  for (const Nanos limit = deadlineIn(longest);
       now() < limit && !state_->guard.failed() && isInFlight();
       nap = std::min(2 * nap, 5 * kMillisecond))
    std::this_thread::sleep_for(std::chrono::nanoseconds(nap));
  forEachConnection([](int, int socket) { shutdown(socket, SHUT_WR); });
}

size_t TcpTransport::stagingBytes() const {
  return state_->pool.bytes();
}

std::vector<Line> TcpTransport::lines() const {
  const std::lock_guard lock(state_->mutex);
  return state_->lines;
}

std::vector<std::string> TcpTransport::routes() const {
  const std::lock_guard lock(state_->mutex);
  return state_->routes;
}

}  // namespace ringreduce
