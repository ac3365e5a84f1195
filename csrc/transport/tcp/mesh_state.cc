// Streams to and from all ranks, moved by whoever waits.
#include "transport/tcp/mesh_state.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <utility>

#include "base/error.h"

namespace ringreduce {

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

Mesh::State::State(int rank_, int size_, Watch& watch_, Dial dial, const Options& options_)
    : rank(rank_),
      size(size_),
      watch(watch_),
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

void Mesh::State::add(Connection& connection) const {
  epoll_event event{.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET,
                    .data = {.ptr = &connection}};
  if (epoll_ctl(epoll.get(), EPOLL_CTL_ADD, connection.socket.get(), &event) != 0)
    throwErrno(Failure::kSetup, "a connection cannot be watched");
}

void Mesh::State::collect() {
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
    if (stream.openLanes() >= kMostLanes) continue;  // no rank makes as many
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
void Mesh::State::limitUnsent(Out& o) {
  net::SendStream& stream = o.stream;
  const int bytes = stream.used() == 1    ? -1
                    : o.count.isLongWay() ? kMostUnsentFar
                                          : kMostUnsentNear;
  for (int i = 0; i < stream.lanes(); ++i)
    setsockopt(stream.lane(i).socket.get(), IPPROTO_TCP, TCP_NOTSENT_LOWAT, &bytes, sizeof bytes);
}

void Mesh::State::failedToDial(int to, const net::NotMade& error) {
  // One more connection is not to be had: those that there are do.
  Out& o = out(to);
  if (o.stream.lanes() > 0) return o.count.limit(o.stream.lanes());
  watch.broken(error.own ? rank : to, error.why);
}

bool Mesh::State::look(int longest_ms) {
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
void Mesh::State::request(int to, Out& o, int wanted) {
  while (o.requested < wanted && (o.requested == 0 || budget.take())) request(to, o);
  if (o.requested < wanted) o.count.limit(o.requested);
}

void Mesh::State::request(int to, Out& o) {
  const int lane = o.requested++;
  dialler.call(to, lane, [this, to, lane](net::Socket socket, const net::NotMade& error) {
    const std::lock_guard lock(mutex);
    made.push_back({to, lane, std::move(socket), error});
    ringBell();
  });
}

void Mesh::State::consider(int to, Out& o) {
  if (o.requested == 0) return request(to, o, options.least_lanes);
  o.busy = o.busy && o.stream.unsent() >= kBacklog;
  if (o.stream.lanes() == 0 || now() < o.next_look) return;
  o.next_look = now() + kLookEvery;
  const int wanted = o.count.look(sampleOf(o.stream), o.busy);
  o.busy = true;
  request(to, o, wanted);
  if (const int before = o.stream.used(); o.stream.use(wanted), o.stream.used() < before)
    limitUnsent(o);
}

bool Mesh::State::progress() {
  bool moved = false;
  for (size_t i = 0; i < receiving.size(); ++i) {
    const int from = receiving[i];
    net::RecvStream& stream = in(from).stream;
    const Moved what = stream.progress();
    if (what == Moved::kBroken) watch.broken(from, stream.why());
    moved = moved || what == Moved::kSome;
  }
  for (size_t i = 0; i < sending.size();) {
    const int to = sending[i];
    Out& o = out(to);
    consider(to, o);
    const Moved what = o.stream.progress();
    if (what == Moved::kBroken) watch.broken(to, o.stream.why());
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
void Mesh::State::lookForSilence() {
  const Nanos time = now();
  if (time < next_silence_look) return;
  next_silence_look = time + longestSilence() / 8;
  for (int r = 0; r < size; ++r) {
    const auto& one = outs[static_cast<size_t>(r)];
    for (int i = 0; one && i < one->stream.lanes(); ++i) {
      Connection& lane = one->stream.lane(i);
      const Nanos silent = lane.silence.look(lane.socket);
      if (silent <= longestSilence() || watch.stateOf(r) != PeerState::kHere) continue;
      watch.broken(r, "nothing that was sent " + net::wayOf(lane.socket) + " has arrived for " +
                          std::to_string(silent / kSecond) +
                          " s, while its control connection lives: something between these two "
                          "addresses drops packets");
    }
  }
}

// Its system goes on sending what is left, for as long as it takes.
void Mesh::State::lookAfter(int r, Ready ready, Gone& gone) {
  const PeerState fate = watch.stateOf(r);
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
    watch.broken(r, "it is gone");
}

}  // namespace ringreduce
