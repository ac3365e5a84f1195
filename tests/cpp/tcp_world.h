// The ranks of stream_world.h over TCP on loopback; some of them share the memory of a host.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"
#include "check.h"
#include "collectives/over_streams.h"
#include "stream_world.h"
#include "transport/shm/byte_pipe.h"
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

// The memory that ranks of one host have for pipes, as their segments would hold it.
class HostOfThreads {
 public:
  explicit HostOfThreads(std::vector<int> ranks) : ranks_(std::move(ranks)) {
    for (size_t i = 0; i < ranks_.size(); ++i) {
      Rank& one = all_.emplace_back();
      one.page = std::make_unique<RankPage>();
      one.boxes = std::make_unique<Box[]>(ranks_.size());
      one.rings = std::make_unique<std::byte[]>(ranks_.size() * kRingBytes);
      one.doorbell = Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
      CHECK(static_cast<bool>(one.doorbell));
      memory_.push_back({.page = one.page.get(),
                         .boxes = one.boxes.get(),
                         .rings = one.rings.get(),
                         .doorbell = one.doorbell.get()});
    }
  }

  template <class Rules = HostRules>
  std::unique_ptr<Neighbours> of(int rank) const {
    const auto me = std::ranges::find(ranks_, rank) - ranks_.begin();
    return std::make_unique<BasicNeighbours<Rules>>(memory_, static_cast<size_t>(me), ranks_);
  }

 private:
  struct Rank {
    std::unique_ptr<RankPage> page;
    std::unique_ptr<Box[]> boxes;
    std::unique_ptr<std::byte[]> rings;
    Fd doorbell;
  };
  const std::vector<int> ranks_;
  std::vector<Rank> all_;
  std::vector<PipeMemory> memory_;
};

// Runs body in a thread for each of `size` ranks; throws the first error.  Rank r is on host
// r mod `hosts`, whose ranks share memory; 0: each is on a host of its own.
inline void overTcp(int size, const std::function<void(OneRank&)>& body, const TcpOptions& tcp = {},
                    Nanos timeout = 60 * kSecond, const StreamOptions& options = {},
                    int hosts = 0) {
  std::deque<HostOfThreads> memory;
  for (int h = 0; h < hosts; ++h) {
    std::vector<int> ranks;
    for (int r = h; r < size; r += hosts) ranks.push_back(r);
    memory.emplace_back(ranks);
  }
  const auto fabricOf = [&](World& world, int r) {
    const auto dial = [&world, r, hosts](int to, int, const std::function<void()>&) {
      CHECK(hosts == 0 || to % hosts != r % hosts);  // those have their pipes
      TcpPair pair = tcpPair();
      world.deliver(r, to, std::move(pair.accepted));
      return std::move(pair.dialled);
    };
    return std::make_unique<TcpFabric>(
        dial, tcp, hosts > 0 ? memory[static_cast<size_t>(r % hosts)].of(r) : nullptr);
  };
  World(size, fabricOf, timeout, options).run(body);
}

}  // namespace tcp_world
