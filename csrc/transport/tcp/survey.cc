// A burst over one connection, and the schedule of pairs.
#include "transport/tcp/survey.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <system_error>
#include <vector>

#include "base/error.h"

namespace ringreduce::net {
namespace {

constexpr size_t kProbeBytes = 256 << 10;
// Unsent bytes that the kernel may hold.  They are dropped with the connection, and must not
// disturb the next round.
constexpr int kUnsent = 128 << 10;
constexpr char kHere = 'm';

// Counts received bytes over time.
class Count {
 public:
  void add(size_t bytes) {
    const Nanos time = now();
    if (bytes == 0) return;
    total_ += bytes;
    if (steps_.empty() || time - steps_.back().time >= kStep) steps_.push_back({time, total_});
    last_ = {time, total_};
  }
  size_t total() const { return total_; }
  Nanos began() const { return steps_.empty() ? 0 : steps_.front().time; }

  double mbit() const {
    if (steps_.empty()) return 0;
    const Nanos half = steps_.front().time + (last_.time - steps_.front().time) / 2;
    auto from = std::ranges::find_if(steps_, [&](const Step& one) { return one.time >= half; });
    if (from == steps_.end() || last_.time - from->time < kStep) from = steps_.begin();
    const Nanos time = last_.time - from->time;
    if (time <= 0) return 0;
    return static_cast<double>(last_.total - from->total) * 8e3 / static_cast<double>(time);
  }

 private:
  static constexpr Nanos kStep = kMillisecond / 4;
  struct Step {
    Nanos time = 0;
    size_t total = 0;
  };
  std::vector<Step> steps_;
  Step last_;
  size_t total_ = 0;
};

[[noreturn]] void ended(const std::string& who, int error) {
  throw Error(Failure::kSetup,
              who + " ended its connection before the line to it was measured" +
                  (error ? ": " + std::generic_category().message(error) : std::string()));
}

// Waits until both ends are ready.
void meet(Socket& socket, const std::string& who, const std::function<void()>& poll) {
  bool said = false;
  for (;;) {
    if (!said) {
      said = socket.send(&kHere, 1) == 1;
      if (!said && errno != EINTR && errno != EAGAIN) ended(who, errno);
    }
    char word = 0;
    const ssize_t n = said ? socket.receive(&word, 1) : -1;
    if (n == 1 && word == kHere) return;
    if (n == 1) throw Error(Failure::kSetup, who + " sent what no rank does to measure a line");
    if (n == 0) ended(who, 0);
    if (said && errno != EINTR && errno != EAGAIN) ended(who, errno);
    poll();
    pollfd wanted{.fd = socket.get(), .events = POLLIN, .revents = 0};
    ::poll(&wanted, 1, 5);
  }
}

Nanos lengthOf(const Fd& connection) {
  return std::clamp(Burst::kRoundTrips * roundTripOf(connection), Burst::kShortest,
                    Burst::kLongest);
}

}  // namespace

Nanos roundTripOf(const Fd& connection) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (getsockopt(connection.get(), IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return 0;
  // Without a minimum the kernel reports ~0.
  const uint32_t shortest = info.tcpi_min_rtt == ~0u ? info.tcpi_rtt : info.tcpi_min_rtt;
  return static_cast<Nanos>(shortest) * kMicrosecond;
}

void sendBurst(Socket& connection, const std::string& who, const std::function<void()>& poll) {
  const int socket = connection.get();
  setsockopt(socket, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &kUnsent, sizeof kUnsent);
  // Bytes that are unsent when the socket is closed are dropped.
  const linger at_once{.l_onoff = 1, .l_linger = 0};
  setsockopt(socket, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  meet(connection, who, poll);
  const std::vector<std::byte> zeros(kProbeBytes);
  const Nanos end = deadlineIn(lengthOf(connection));
  for (size_t sent = 0; now() < end;) {
    const bool sends = sent < Burst::kMostBytes;
    pollfd wanted{
        .fd = socket, .events = static_cast<short>(POLLIN | (sends ? POLLOUT : 0)), .revents = 0};
    if (::poll(&wanted, 1, 5) <= 0) continue;
    // The other end closes the connection when it has measured.
    if (wanted.revents & (POLLIN | POLLHUP | POLLERR)) return;
    const ssize_t n = connection.send(zeros.data(), zeros.size());
    if (n > 0) sent += static_cast<size_t>(n);
    if (n < 0 && errno != EINTR && errno != EAGAIN) return;
  }
}

double receiveBurst(Socket& connection, const std::string& who, const std::function<void()>& poll) {
  meet(connection, who, poll);
  const Nanos longest = lengthOf(connection), begin = now();
  std::vector<std::byte> place(kProbeBytes);
  Count count;
  // The other end begins up to a round trip later.  TLS may hold bytes already.
  bool dry = !connection.holdsBytes();
  while (count.total() < Burst::kMostBytes &&
         now() < (count.began() ? count.began() + longest : begin + 2 * longest)) {
    pollfd wanted{.fd = connection.get(), .events = POLLIN, .revents = 0};
    if (dry && ::poll(&wanted, 1, 5) <= 0) continue;
    const ssize_t n = connection.receive(place.data(), place.size());
    dry = n <= 0;
    if (n > 0) count.add(static_cast<size_t>(n));
    if (n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN)) break;
  }
  return count.mbit();
}

// Round-robin tournament.  An odd number of hosts forms a circle; in a round two hosts are partners
// if the sum of their numbers is the number of the round (modulo the size of the circle); one host
// has no partner.  If the number of hosts is even, the last host is not in the circle and is the
// partner of that one.
int partnerOf(int host, int round, int hosts) {
  const int circle = hosts - 1 + hosts % 2;
  const bool odd = hosts % 2 != 0;
  if (!odd && host == hosts - 1) return round * ((circle + 1) / 2) % circle;  // half of the round
  const int partner = ((round - host) % circle + circle) % circle;
  if (partner != host) return partner;
  return odd ? -1 : hosts - 1;
}

}  // namespace ringreduce::net
