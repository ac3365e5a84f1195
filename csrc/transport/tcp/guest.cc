// The socket's side of a guest.
#include "transport/tcp/guest.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <span>

namespace ringreduce::net {
namespace {

constexpr size_t kMostDiscarded = 4096;

}  // namespace

bool Guest::read() {
  std::array<std::byte, 256> bytes;
  while (machine.wants() > 0) {
    const size_t most = std::min(bytes.size(), machine.wants());
    const ssize_t got = recv(socket.get(), bytes.data(), most, 0);
    if (got == 0) return false;
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno == EAGAIN;
    machine.feed(std::span(bytes).first(static_cast<size_t>(got)));
  }
  return true;
}

bool Guest::write() {
  while (!output.empty()) {
    const ssize_t sent = send(socket.get(), output.data(), output.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return errno == EAGAIN;
    output.erase(0, static_cast<size_t>(sent));
  }
  return true;
}

// What was not read when a socket is closed makes the system throw away what was sent.
bool Guest::discard() {
  std::array<std::byte, 256> bytes;
  while (discarded < kMostDiscarded) {
    const ssize_t got = recv(socket.get(), bytes.data(), bytes.size(), 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return got < 0 && errno == EAGAIN;
    discarded += static_cast<size_t>(got);
  }
  return false;
}

}  // namespace ringreduce::net
