// How a group gets the transport of its collectives between hosts.  A network has one class for
// this; epoch/network.cc chooses it, and hands it the connections that other ranks make.  One that
// dials gets a net::Dial when it is made.  The authenticated connection that comes of it may carry
// set-up data, such as the addresses of queue pairs.
#pragma once

#include <memory>

#include "transport/transport.h"
#include "transport/wait_guard.h"

namespace ringreduce {

namespace net {
class Socket;  // transport/tcp/socket.h
}

class Fabric {
 public:
  virtual ~Fabric() = default;

  // The transport of one rank, which polls `guard` while it waits.  Once.  The guard must live as
  // long as the transport.
  virtual std::unique_ptr<Transport> make(int rank, int size, WaitGuard& guard) = 0;
  // Takes an authenticated connection for data that another rank has made, while the transport
  // lives.  From any thread.
  virtual void accept(int from, net::Socket socket) = 0;
};

}  // namespace ringreduce
