// The fabric of TCP.
#pragma once

#include <memory>
#include <utility>

#include "transport/fabric.h"
#include "transport/tcp/connector.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/transport.h"
#include "transport/wait_guard.h"

namespace ringreduce {

class TcpFabric final : public Fabric {
 public:
  // `dial` makes connections of any number to a rank of the transport.
  TcpFabric(net::Dial dial, TcpOptions options)
      : dial_(std::move(dial)), options_(std::move(options)) {}

  std::unique_ptr<Transport> make(int rank, int size, WaitGuard& guard) override {
    auto made = std::make_unique<TcpTransport>(rank, size, guard, dial_, options_);
    transport_ = made.get();
    return made;
  }
  void accept(int from, net::Socket socket) override {
    transport_->accept(from, std::move(socket));
  }

 private:
  const net::Dial dial_;
  const TcpOptions options_;
  TcpTransport* transport_ = nullptr;
};

}  // namespace ringreduce
