// A connection to another rank, plain or encrypted (transport/tcp/tls.h), and how to find out that
// it is dead although neither end closed it.
//
// A firewall or one of several paths may drop the packets of one connection, while others, such as
// the control ring, still get through.  A sender notices that nothing is acknowledged (Silence).  A
// stopped or slow rank is not mistaken for that: its system acknowledges, or reports that it has no
// room.  A receiver sends nothing, so its system probes the other now and then (probeWhenIdle).
#pragma once

#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/fd.h"
#include "transport/tcp/handshake.h"
#include "transport/tcp/tls.h"

namespace ringreduce::net {

class Socket {
 public:
  Socket() = default;
  Socket(Fd fd) : fd_(std::move(fd)) {}  // plain
  Socket(Fd fd, std::unique_ptr<Tls> tls) : tls_(std::move(tls)), fd_(std::move(fd)) {}
  Socket(Socket&&) = default;
  Socket& operator=(Socket&&) = default;

  explicit operator bool() const { return static_cast<bool>(fd_); }
  // The descriptor, for epoll, socket options and shutdown; not for reading or writing.
  int get() const { return fd_.get(); }
  operator const Fd&() const { return fd_; }
  bool isEncrypted() const { return tls_ != nullptr; }
  void reset() {
    tls_.reset();
    fd_.reset();
  }

  // As sendmsg and recvmsg, but they never wait and raise no signal.  After EAGAIN, or a part,
  // offer the same remaining bytes again before others.
  ssize_t send(const iovec* pieces, size_t count) {
    if (tls_) return tls_->send(pieces, count);
    const msghdr message = messageOf(pieces, count);
    return sendmsg(get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  ssize_t receive(const iovec* pieces, size_t count) {
    if (tls_) return tls_->receive(pieces, count);
    msghdr message = messageOf(pieces, count);
    const ssize_t n = recvmsg(get(), &message, MSG_DONTWAIT);
    if (n > 0) bytes_read_ += static_cast<uint64_t>(n);
    return n;
  }
  // Bytes that were read, as they travel.
  uint64_t bytesRead() const { return tls_ ? tls_->bytesRead() : bytes_read_; }
  ssize_t send(const void* data, size_t bytes) {
    const iovec piece{const_cast<void*>(data), bytes};
    return send(&piece, 1);
  }
  ssize_t receive(void* data, size_t bytes) {
    const iovec piece{data, bytes};
    return receive(&piece, 1);
  }
  // Whether received bytes may wait here although the kernel has none, so that epoll reports
  // nothing.  Ask after a read that did not end with EAGAIN.
  bool holdsBytes() const { return tls_ && tls_->holdsBytes(); }

 private:
  static msghdr messageOf(const iovec* pieces, size_t count) {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(pieces);
    message.msg_iovlen = count;
    return message;
  }

  uint64_t bytes_read_ = 0;  // of a plain one
  std::unique_ptr<Tls> tls_;
  Fd fd_;
};

// An errno of send or receive, in words.
std::string textOfError(int error);

// "from 10.0.0.2:41000 to 10.0.0.3:4711": from here to the other end.
std::string routeOf(const Fd& socket);

// Move bytes of a handshake over a non-blocking socket, none beyond it.  False if the connection
// has ended.
bool receiveHandshake(const Fd& socket, Handshake& machine);
bool sendHandshake(const Fd& socket, std::string& output);

// How long a connection has been silent.  Look during waits; long times may pass between two looks.
class Silence {
 public:
  // How long bytes have been in flight without a packet from the other system, as far as is known.
  // `heard`, `sent`: how long ago the last packet came, and the last data went.
  Nanos look(Nanos time, bool in_flight, Nanos heard, Nanos sent);
  // The same with the values of the kernel; 0 if it has none.
  Nanos look(const Fd& socket);

 private:
  Nanos since_ = 0, looked_ = 0;
  bool in_flight_ = false;
};

// Makes the kernel probe the other system while the connection is idle.  It ends with ETIMEDOUT if
// no answer comes for about `longest`, or a few seconds if that is shorter.
void probeWhenIdle(const Fd& socket, Nanos longest);

// How many bytes have arrived that were not read yet.
uint64_t bytesWaiting(const Fd& socket);

}  // namespace ringreduce::net
