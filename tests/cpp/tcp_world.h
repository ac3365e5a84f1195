// The ranks of stream_world.h over TCP on loopback.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"
#include "check.h"
#include "collectives/over_streams.h"
#include "stream_world.h"
#include "transport/tcp/stream.h"
#include "transport/tcp/tcp_transport.h"

namespace tcp_world {

using namespace ringreduce;
using stream_world::OneRank;
using stream_world::World;

// Two ends of a connection over TCP.
struct TcpPair {
  Fd dialled, accepted;
};

inline TcpPair tcpPair() {
  const Fd listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  CHECK(bind(listener.get(), generic, length) == 0 && listen(listener.get(), 1) == 0);
  CHECK(getsockname(listener.get(), generic, &length) == 0);
  TcpPair pair{.dialled = Fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)), .accepted = {}};
  CHECK(connect(pair.dialled.get(), generic, length) == 0);
  pair.accepted = Fd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  CHECK(static_cast<bool>(pair.accepted));
  const int on = 1;
  for (const Fd* end : {&pair.dialled, &pair.accepted})
    setsockopt(end->get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  return pair;
}

// A frame as it goes over a connection, with so many bytes in it.
inline std::vector<unsigned char> framed(net::Frame frame, size_t payload) {
  std::vector<unsigned char> raw(sizeof frame + payload, 7);
  std::memcpy(raw.data(), &frame, sizeof frame);
  return raw;
}

// Runs body in a thread for each of `size` ranks; throws the first error.
inline void overTcp(int size, const std::function<void(OneRank&)>& body, const TcpOptions& tcp = {},
                    Nanos timeout = 60 * kSecond, const StreamOptions& options = {}) {
  const auto fabricOf = [&](World& world, int r) {
    return std::make_unique<TcpFabric>(
        [&world, r](int to, int, const std::function<void()>&) {
          TcpPair pair = tcpPair();
          world.deliver(r, to, std::move(pair.accepted));
          return std::move(pair.dialled);
        },
        tcp);
  };
  World(size, fabricOf, timeout, options).run(body);
}

}  // namespace tcp_world
