// The transport over TCP: one or more connections in each direction between two ranks, made when a
// rank first sends.  Ranks of one host that share memory have a pipe there instead, from the start.
// The thread that waits moves all bytes, on both wires; there is no other thread for data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "transport/fabric.h"
#include "transport/neighbours.h"
#include "transport/tcp/connector.h"
#include "transport/tcp/socket.h"
#include "transport/transport.h"
#include "transport/wait_guard.h"

namespace ringreduce {

// Connections that a rank may make to another.
inline constexpr int kMaxConnections = 64;

struct TcpOptions {
  // Connections to a rank; the number is adapted between these two (stream.h).
  int min_connections = 1;
  int max_connections = kMaxConnections;
  // The rank numbers to show in routes() and lines(), if they differ from the transport's own.
  std::vector<int> shown = {};
  // When the control ring declares a rank lost.  Bytes of a rank that has left or ended are awaited
  // for twice as long after the last ones arrived.
  Nanos lost_after = 3 * kSecond;
  // Connections on a short path do not keep BBR.  False if the user chose a congestion control.
  bool leaves_bbr = true;
};

class TcpTransport final : public Transport {
 public:
  // `dial` makes connections of any number to a rank.  `neighbours` are reached without; null:
  // there are none.
  TcpTransport(int rank, int size, WaitGuard& guard, net::Dial dial, const TcpOptions& options,
               std::unique_ptr<Neighbours> neighbours);
  ~TcpTransport() override;

  // Takes a connection that rank `from` has made, or closes it if that rank has kMaxConnections.
  // From any thread.
  void accept(int from, net::Socket socket);

  void advance() override;
  void finish() override;
  void send(int to, const void* data, size_t bytes) override;
  std::byte* acquire(int to) override;
  void post(int to, std::byte* buffer, size_t bytes) override;
  void expect(int from, void* data, size_t bytes) override;
  void expect(int from, size_t bytes) override;
  const std::byte* peek(int from) override;
  void release(int from) override;

  void setPatience(Patience patience) override;
  void setLineRate(uint64_t rate) override;
  void leave(Nanos longest) override;
  size_t stagingBytes() const override;
  uint64_t bytesSent() const override;
  // By the numbers that are shown.
  std::vector<Line> lines() const override;
  // How many connections there are to each rank, and why; or that it shares memory.
  std::vector<std::string> routes() const override;

 private:
  void open(const Opening& operation) override;
  uint64_t arrived() override;

  struct State;
  std::unique_ptr<State> state_;
};

// Makes the transport, and hands it the connections of other ranks.
class TcpFabric final : public Fabric {
 public:
  // As the transport has them, by its numbers of ranks.
  TcpFabric(net::Dial dial, TcpOptions options, std::unique_ptr<Neighbours> neighbours = nullptr)
      : dial_(std::move(dial)), options_(std::move(options)), neighbours_(std::move(neighbours)) {}

  std::unique_ptr<Transport> make(int rank, int size, WaitGuard& guard) override {
    auto made =
        std::make_unique<TcpTransport>(rank, size, guard, dial_, options_, std::move(neighbours_));
    transport_ = made.get();
    return made;
  }
  void accept(int from, net::Socket socket) override {
    transport_->accept(from, std::move(socket));
  }

 private:
  const net::Dial dial_;
  const TcpOptions options_;
  std::unique_ptr<Neighbours> neighbours_;  // until the transport has them
  TcpTransport* transport_ = nullptr;
};

}  // namespace ringreduce
