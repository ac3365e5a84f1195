// A connection to another rank, plain or encrypted (transport/tcp/tls.h): chosen when it is made,
// and the same to whoever sends and receives.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "base/fd.h"
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
  // The socket itself: to be watched, asked and shut down, not to be read or written.
  int get() const { return fd_.get(); }
  operator const Fd&() const { return fd_; }
  bool isEncrypted() const { return tls_ != nullptr; }
  void reset() {
    tls_.reset();
    fd_.reset();
  }

  // As sendmsg and recvmsg: never wait, raise no signal, -1 with errno, 0 at the end of what comes.
  // After EAGAIN, or a part, the bytes that were not taken must be offered again before others.
  ssize_t send(const iovec* pieces, size_t count) {
    if (tls_) return tls_->send(pieces, count);
    const msghdr message = messageOf(pieces, count);
    return sendmsg(get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  ssize_t receive(const iovec* pieces, size_t count) {
    if (tls_) return tls_->receive(pieces, count);
    msghdr message = messageOf(pieces, count);
    return recvmsg(get(), &message, MSG_DONTWAIT);
  }
  ssize_t send(const void* data, size_t bytes) {
    const iovec piece{const_cast<void*>(data), bytes};
    return send(&piece, 1);
  }
  ssize_t receive(void* data, size_t bytes) {
    const iovec piece{data, bytes};
    return receive(&piece, 1);
  }
  // Whether there may be something to receive although the system has nothing more: for whoever
  // leaves off before EAGAIN.
  bool holdsBytes() const { return tls_ && tls_->holdsBytes(); }

 private:
  static msghdr messageOf(const iovec* pieces, size_t count) {
    msghdr message{};
    message.msg_iov = const_cast<iovec*>(pieces);
    message.msg_iovlen = count;
    return message;
  }

  std::unique_ptr<Tls> tls_;
  Fd fd_;
};

// What an errno of these means.
std::string textOfError(int error);

}  // namespace ringreduce::net
