// Errors and addresses in words, and what the kernel knows of a connection.
#include "transport/tcp/socket.h"

#include <linux/tcp.h>
#include <netinet/in.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/tcp/address.h"

namespace ringreduce::net {
namespace {

// The kernel's clock for this advances in steps of up to 10 ms.
constexpr Nanos kInexact = 20 * kMillisecond;

using Name = int (*)(int, sockaddr*, socklen_t*);

std::string addressOf(const Fd& socket, Name name) {
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  auto* address = reinterpret_cast<sockaddr*>(&storage);
  if (name(socket.get(), address, &size) != 0) return "an address that is not known any more";
  return Address(address, size).text();
}

}  // namespace

std::string textOfError(int error) {
  if (error == EBADMSG)
    return "what came cannot be decrypted: it was changed on its way, or no rank of this group "
           "sent it";
  return std::strerror(error);
}

std::string routeOf(const Fd& socket) {
  return "from " + addressOf(socket, getsockname) + " to " + addressOf(socket, getpeername);
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
  return look(now(), info.tcpi_unacked > 0 || info.tcpi_probes > 0,
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

}  // namespace ringreduce::net
