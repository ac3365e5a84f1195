// The smallest transport, as an example of what one needs: a Unix socket pair between any two
// ranks, and poll().  Each direction of a pair is one stream of plain bytes, so these arrive in
// order, and a rank reads only what it has a place for.
#pragma once

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "check.h"
#include "stream_world.h"
#include "transport/fabric.h"
#include "transport/tcp/socket.h"
#include "transport/transport.h"
#include "transport/wait_guard.h"

namespace socketpairs {

using namespace ringreduce;

class SocketpairTransport final : public Transport {
 public:
  SocketpairTransport(int rank, int size, WaitGuard& guard)
      : Transport(rank, size), guard_(guard), peers_(static_cast<size_t>(size)) {}

  void accept(int from, net::Socket socket) { peer(from).socket = std::move(socket); }

  void advance() override { move(); }
  void finish() override {
    for (int r = 0; r < size(); ++r) waitFor(r, [&] { return peer(r).out.empty(); });
  }

  void send(int to, const void* data, size_t bytes) override {
    announced(to).out.push_back({static_cast<const std::byte*>(data), bytes, nullptr});
  }
  std::byte* acquire(int to) override {
    Peer& p = peer(to);
    waitFor(to, [&] { return p.buffers < kWindow; });
    p.filling.push_back(std::make_unique_for_overwrite<std::byte[]>(kPieceBytes));
    return p.filling.back().get();
  }
  void post(int to, std::byte* buffer, size_t bytes) override {
    Peer& p = announced(to);
    const auto filled = std::ranges::find(p.filling, buffer, &Buffer::get);
    p.out.push_back({buffer, bytes, std::move(*filled)});
    p.filling.erase(filled);
    ++p.buffers;
  }

  void expect(int from, void* data, size_t bytes) override {
    expecting(from).in.push_back({static_cast<std::byte*>(data), bytes, nullptr});
  }
  void expect(int from, size_t bytes) override {
    CHECK(bytes <= kPieceBytes);
    Buffer own = std::make_unique_for_overwrite<std::byte[]>(bytes);
    expecting(from).in.push_back({own.get(), bytes, std::move(own)});
  }
  const std::byte* peek(int from) override {
    Peer& p = peer(from);
    const auto arrived = [&] { return p.in.front().moved == p.in.front().bytes; };
    if (!p.verified) {
      waitFor(from, arrived);
      p.in.pop_front();
      p.verified = true;
      guard_.verify(from, p.theirs);
      hear(p.theirs);
    }
    waitFor(from, arrived);
    return p.in.front().data;
  }
  void release(int from) override { peer(from).in.pop_front(); }

 private:
  using Buffer = std::unique_ptr<std::byte[]>;
  template <class Byte>
  struct Piece {
    Byte* data;
    size_t bytes;
    Buffer own;  // null: the caller's memory
    size_t moved = 0;
  };
  struct Peer {
    net::Socket socket;
    std::deque<Piece<const std::byte>> out;
    std::deque<Piece<std::byte>> in;
    std::vector<Buffer> filling;  // acquired and not posted
    size_t buffers = 0;           // of `out`
    bool announced = false, verified = false;
    Opening theirs;
  };

  void open(const Opening& operation) override {
    operation_ = operation;
    for (Peer& p : peers_) p.announced = p.verified = false;
  }

  uint64_t arrived() override {
    uint64_t bytes = read_;
    for (const Peer& p : peers_) bytes += net::bytesWaiting(p.socket);
    return bytes;
  }

  Peer& peer(int r) { return peers_[static_cast<size_t>(r)]; }
  Peer& announced(int to) {
    Peer& p = peer(to);
    if (!std::exchange(p.announced, true))
      p.out.push_back(
          {reinterpret_cast<const std::byte*>(&operation_), sizeof operation_, nullptr});
    return p;
  }
  Peer& expecting(int from) {
    Peer& p = peer(from);
    if (!p.verified && p.in.empty())
      p.in.push_back({reinterpret_cast<std::byte*>(&p.theirs), sizeof p.theirs, nullptr});
    return p;
  }

  // Moves what the sockets take and have, to and from all ranks.  Returns whether that was
  // anything.
  bool move() {
    bool moved = false;
    for (int r = 0; r < size(); ++r) {
      Peer& p = peer(r);
      for (; !p.out.empty() && pass(r, p.out.front(), moved); p.out.pop_front())
        if (p.out.front().own) --p.buffers;
      for (auto& place : p.in)
        if (!pass(r, place, moved)) break;
    }
    return moved;
  }
  // Moves more of a piece; returns whether it is complete.
  template <class Byte>
  bool pass(int r, Piece<Byte>& piece, bool& moved) {
    while (piece.moved < piece.bytes) {
      net::Socket& socket = peer(r).socket;
      Byte* const data = piece.data + piece.moved;
      ssize_t n;
      if constexpr (std::is_const_v<Byte>)
        n = socket.send(data, piece.bytes - piece.moved);
      else
        n = socket.receive(data, piece.bytes - piece.moved);
      if (n < 0 && errno == EAGAIN) return false;
      if (n <= 0) guard_.broken(r, n == 0 ? "it closed the socket" : net::textOfError(errno));
      piece.moved += static_cast<size_t>(n);
      if (!std::is_const_v<Byte>) read_ += static_cast<uint64_t>(n);
      moved = true;
    }
    return true;
  }

  // Waits until ready() is true; rank r must make it so.
  template <class IsReady>
  void waitFor(int r, IsReady ready) {
    while (!ready()) {
      if (move() || ready()) continue;
      std::vector<pollfd> sockets;
      for (const Peer& p : peers_) {
        const bool reads =
            std::ranges::any_of(p.in, [](const auto& place) { return place.moved < place.bytes; });
        sockets.push_back(
            {.fd = p.socket.get(),
             .events = static_cast<short>((reads ? POLLIN : 0) | (p.out.empty() ? 0 : POLLOUT)),
             .revents = 0});
      }
      const int n =
          poll(sockets.data(), sockets.size(), static_cast<int>(kLongestSleep / kMillisecond));
      if (n == 0) guard_.idle(Ready(ready));
      guard_.poll(r, Ready(ready));
    }
  }

  WaitGuard& guard_;
  std::vector<Peer> peers_;  // by rank; this one's has no socket
  Opening operation_ = {};
  uint64_t read_ = 0;
};

class SocketpairFabric final : public Fabric {
 public:
  std::unique_ptr<Transport> make(int rank, int size, WaitGuard& guard) override {
    auto made = std::make_unique<SocketpairTransport>(rank, size, guard);
    transport_ = made.get();
    return made;
  }
  void accept(int from, net::Socket socket) override {
    transport_->accept(from, std::move(socket));
  }

 private:
  SocketpairTransport* transport_ = nullptr;
};

// Runs body in a thread for each of `size` ranks; throws the first error.
inline void overSocketpairs(int size, const StreamOptions& options,
                            const std::function<void(stream_world::OneRank&)>& body) {
  const auto fabricOf = [](auto&, int) { return std::make_unique<SocketpairFabric>(); };
  stream_world::World world(size, fabricOf, 60 * kSecond, options);
  for (int a = 0; a < size; ++a)
    for (int b = 0; b < a; ++b) {
      int ends[2];
      CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
      world.deliver(a, b, Fd(ends[0]));
      world.deliver(b, a, Fd(ends[1]));
    }
  world.run(body);
}

}  // namespace socketpairs
