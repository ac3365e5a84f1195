// Connections made by hand, for tests: over loopback TCP or within a machine.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <chrono>
#include <functional>
#include <thread>
#include <utility>

#include "base/fd.h"
#include "check.h"

namespace sockets {

using ringreduce::Fd;

enum class Over { kUnix, kIpv4, kIpv6 };

// Both ends of a new connection, non-blocking.
inline std::pair<Fd, Fd> pair(Over over) {
  if (over == Over::kUnix) {
    int fds[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0);
    return {Fd(fds[0]), Fd(fds[1])};
  }
  sockaddr_storage storage{};
  socklen_t length = sizeof(sockaddr_in);
  storage.ss_family = AF_INET;
  reinterpret_cast<sockaddr_in*>(&storage)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (over == Over::kIpv6) {
    storage = {};
    storage.ss_family = AF_INET6;
    reinterpret_cast<sockaddr_in6*>(&storage)->sin6_addr = in6addr_loopback;
    length = sizeof(sockaddr_in6);
  }
  auto* address = reinterpret_cast<sockaddr*>(&storage);
  const Fd listener(socket(storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  // A machine without IPv6 has no such loopback.
  if (bind(listener.get(), address, length) != 0 && over == Over::kIpv6) return pair(Over::kIpv4);
  CHECK(listen(listener.get(), 1) == 0);
  CHECK(getsockname(listener.get(), address, &length) == 0);
  Fd one(socket(storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  CHECK(connect(one.get(), address, length) == 0);
  Fd other(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  CHECK(other);
  CHECK(fcntl(one.get(), F_SETFL, O_NONBLOCK) == 0);
  const int yes = 1;
  setsockopt(one.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  setsockopt(other.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  return {std::move(one), std::move(other)};
}

inline void until(const std::function<bool()>& ready, const char* what) {
  const auto start = std::chrono::steady_clock::now();
  while (!ready()) {
    if (std::chrono::steady_clock::now() - start > std::chrono::seconds(20))
      check::fail(what, 0, "has not happened in 20 s");
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

}  // namespace sockets
