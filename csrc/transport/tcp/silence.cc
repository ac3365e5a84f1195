// What the system knows of a connection.
#include "transport/tcp/silence.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>

#include "transport/tcp/address.h"

namespace ringreduce::net {
namespace {

// The system's clock for this goes in steps of up to 10 ms.
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

Nanos Silence::look(Nanos time, bool under_way, Nanos heard, Nanos sent) {
  // What is on its way now may have been sent just now, unless something was at the last look and
  // no word has come since.  And where the other has no room, the system tries again more and more
  // seldom: then nothing is wrong as long as the last try was answered.
  if (!under_way || !under_way_ || heard <= std::max(time - looked_, sent) + kInexact)
    since_ = time;
  under_way_ = under_way;
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

void askNowAndThen(const Fd& socket, Nanos longest) {
  const auto set = [&](int level, int name, int value) {
    setsockopt(socket.get(), level, name, &value, sizeof value);
  };
  const auto seconds = static_cast<int>(std::min<Nanos>(longest / kSecond, 3600));
  const int questions = seconds >= 6 ? 4 : 2;
  set(IPPROTO_TCP, TCP_KEEPIDLE, std::max(1, seconds / 3));
  set(IPPROTO_TCP, TCP_KEEPINTVL, std::max(1, seconds / 6));
  set(IPPROTO_TCP, TCP_KEEPCNT, questions);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
}

std::string wayOf(const Fd& socket) {
  return "from " + addressOf(socket, getsockname) + " to " + addressOf(socket, getpeername);
}

}  // namespace ringreduce::net
