// Errors and addresses in words, and the kernel's knowledge of a connection.
#include "transport/tcp/socket.h"

#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <optional>
#include <span>

#include "transport/tcp/address.h"

namespace ringreduce::net {
namespace {

// The kernel's clock for this advances in steps of up to 10 ms.
constexpr Nanos kInexact = 20 * kMillisecond;

std::string textOf(const std::optional<Address>& address) {
  return address ? address->text() : "an address that is not known any more";
}

}  // namespace

std::string textOfError(int error) {
  if (error == EBADMSG)
    return "what came cannot be decrypted: it was changed on its way, or no rank of this group "
           "sent it";
  return std::strerror(error);
}

std::string routeOf(const Fd& socket) {
  return "from " + textOf(localAddress(socket)) + " to " + textOf(peerAddress(socket));
}

bool receiveHandshake(const Fd& socket, Handshake& machine) {
  std::array<std::byte, 256> bytes;
  while (machine.wants() > 0) {
    const size_t most = std::min(bytes.size(), machine.wants());
    const ssize_t got = recv(socket.get(), bytes.data(), most, 0);
    if (got == 0) return false;
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno == EAGAIN;
    machine.feed(std::span(bytes).first(static_cast<size_t>(got)));
  }
  return true;
}

bool sendHandshake(const Fd& socket, std::string& output) {
  while (!output.empty()) {
    const ssize_t sent = send(socket.get(), output.data(), output.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return errno == EAGAIN;
    output.erase(0, static_cast<size_t>(sent));
  }
  return true;
}

Nanos Silence::look(Nanos time, bool in_flight, Nanos heard, Nanos sent) {
  // Bytes that are in flight now may have left just now, unless some were in flight at the last
  // look and no packet has come since.  If the other system has no room, the kernel probes it more
  // and more rarely: all is well as long as the last probe was answered.
  if (!in_flight || !in_flight_ || heard <= std::max(time - looked_, sent) + kInexact)
    since_ = time;
  in_flight_ = in_flight;
  looked_ = time;
  return time - since_;
}

Nanos Silence::look(const Fd& socket) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (getsockopt(socket.get(), IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return 0;
  return look(monotonicNow(), info.tcpi_unacked > 0 || info.tcpi_probes > 0,
              static_cast<Nanos>(info.tcpi_last_ack_recv) * kMillisecond,
              static_cast<Nanos>(info.tcpi_last_data_sent) * kMillisecond);
}

void probeWhenIdle(const Fd& socket, Nanos longest) {
  const auto set = [&](int level, int name, int value) {
    setsockopt(socket.get(), level, name, &value, sizeof value);
  };
  const auto seconds = static_cast<int>(std::min<Nanos>(longest / kSecond, 3600));
  const int probes = seconds >= 6 ? 4 : 2;
  set(IPPROTO_TCP, TCP_KEEPIDLE, std::max(1, seconds / 3));
  set(IPPROTO_TCP, TCP_KEEPINTVL, std::max(1, seconds / 6));
  set(IPPROTO_TCP, TCP_KEEPCNT, probes);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
}

uint64_t bytesWaiting(const Fd& socket) {
  int bytes = 0;
  return ioctl(socket.get(), SIOCINQ, &bytes) == 0 && bytes > 0 ? static_cast<uint64_t>(bytes) : 0;
}

}  // namespace ringreduce::net
