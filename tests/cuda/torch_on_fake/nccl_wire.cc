// Joining, and letters by sockets.  A thread for each peer takes what it sends, so that nobody who
// sends has to wait until it is wanted.
#include "nccl_wire.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

namespace fake::nccl {
namespace {

std::mutex words_mutex;
std::string& words() {
  static auto* those = new std::string;
  return *those;
}

struct Socket {
  int fd;
  explicit Socket(int fd) : fd(fd) {}
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  ~Socket() {
    if (fd >= 0) close(fd);
  }
  int take() { return std::exchange(fd, -1); }
};

[[noreturn]] void systemError(const char* call) {
  throw Failed{kSystemError, std::string(call) + ": " + std::strerror(errno)};
}

int newSocket() {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) systemError("socket");
  return fd;
}

// One of the names that need no file.
struct Address {
  sockaddr_un at{};
  socklen_t length;

  Address(const std::string& name, int rank) {
    const std::string text = name + "." + std::to_string(rank);
    if (text.size() + 1 > sizeof at.sun_path)
      throw Failed{kInvalidArgument, "an id that is not from ncclGetUniqueId"};
    at.sun_family = AF_UNIX;
    std::memcpy(at.sun_path + 1, text.data(), text.size());
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&at); }
};

bool writeAll(int fd, const void* data, size_t bytes) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::send(fd, at, bytes, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += n;
    bytes -= static_cast<size_t>(n);
  }
  return true;
}

bool readAll(int fd, void* data, size_t bytes) {
  auto* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t n = recv(fd, at, bytes, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += n;
    bytes -= static_cast<size_t>(n);
  }
  return true;
}

int connectTo(const Address& address) {
  for (;;) {
    Socket made(newSocket());
    if (connect(made.fd, address.get(), address.length) == 0) return made.take();
    if (errno != ECONNREFUSED && errno != EINTR) systemError("connect");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // it has not come yet
  }
}

// Exchanges ranks with the other end.
Facts meet(int fd, const Facts& own) {
  Facts other;
  if (!writeAll(fd, &own, sizeof own) || !readAll(fd, &other, sizeof other))
    throw Failed{kRemoteError, "rank " + std::to_string(own.rank) + " of " +
                                   std::to_string(own.size) + ": a rank ended while it joined"};
  if (other.size != own.size)
    throw Failed{kInvalidUsage, "rank " + std::to_string(own.rank) + " joins " +
                                    std::to_string(own.size) + " ranks, rank " +
                                    std::to_string(other.rank) + " joins " +
                                    std::to_string(other.size)};
  return other;
}

}  // namespace

void warn(const std::string& text) {
  const std::lock_guard lock(words_mutex);
  words() = text;
  if (const char* debug = std::getenv("NCCL_DEBUG"); debug && std::strcmp(debug, "VERSION") != 0)
    std::fprintf(stderr, "fake NCCL: %s\n", text.c_str());
}

std::string lastWarning() {
  const std::lock_guard lock(words_mutex);
  return words();
}

void punish(const std::string& text) {
  std::fprintf(stderr, "fake NCCL: %s\n", text.c_str());
  // Without Python's handler, which reads the stacks of threads that run on and may fall over them.
  std::signal(SIGABRT, SIG_DFL);
  std::abort();
}

// ---- joining

Wire::Wire(const Facts& own)
    : own_(own.rank), facts_(static_cast<size_t>(own.size)), peers_(static_cast<size_t>(own.size)) {
  facts_[static_cast<size_t>(own_)] = own;
}

std::shared_ptr<Wire> Wire::join(const std::string& name, const Facts& own) {
  std::shared_ptr<Wire> wire(new Wire(own));
  const Address mine(name, own.rank);
  const Socket listener(newSocket());
  if (bind(listener.fd, mine.get(), mine.length) != 0) {
    if (errno != EADDRINUSE) systemError("bind");
    throw Failed{kInvalidUsage, "rank " + std::to_string(own.rank) + " of " +
                                    std::to_string(own.size) + " joins twice by one id"};
  }
  if (listen(listener.fd, own.size) != 0) systemError("listen");
  const auto known = [&](int fd) {
    Socket socket(fd);
    const Facts facts = meet(fd, own);
    const auto other = static_cast<size_t>(facts.rank);
    wire->facts_[other] = facts;
    wire->peers_[other].socket = socket.take();
  };
  for (int lower = 0; lower < own.rank; ++lower) known(connectTo(Address(name, lower)));
  for (int higher = own.rank + 1; higher < own.size; ++higher) {
    const int fd = accept4(listener.fd, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) systemError("accept");
    known(fd);
  }
  for (int peer = 0; peer < own.size; ++peer)
    if (peer != own.rank) std::thread([wire, peer] { wire->read(peer); }).detach();
  return wire;
}

Wire::~Wire() {
  for (const Peer& peer : peers_)
    if (peer.socket >= 0) close(peer.socket);
}

// ---- letters

void Wire::read(int from) {
  const int fd = peers_[static_cast<size_t>(from)].socket;
  Letter letter;
  while (readAll(fd, &letter.heading, sizeof letter.heading)) {
    letter.data.resize(letter.heading.bytes);
    if (!readAll(fd, letter.data.data(), letter.data.size())) break;
    deliver(from, std::move(letter));
    letter = {};
  }
  const std::lock_guard lock(mutex_);
  peers_[static_cast<size_t>(from)].gone = true;
  changed_.notify_all();
}

void Wire::deliver(int from, Letter letter) {
  const std::lock_guard lock(mutex_);
  const auto kind = static_cast<size_t>(letter.heading.kind);
  peers_[static_cast<size_t>(from)].letters[kind].push_back(std::move(letter));
  changed_.notify_all();
}

void Wire::send(int to, Heading heading, const void* data) {
  if (to == own_) {
    const auto* bytes = static_cast<const std::byte*>(data);
    return deliver(to, {heading, {bytes, bytes + heading.bytes}});
  }
  Peer& peer = peers_[static_cast<size_t>(to)];
  const std::lock_guard lock(peer.sending);
  // Where it fails, `receive` notices that the rank is gone.
  if (writeAll(peer.socket, &heading, sizeof heading)) writeAll(peer.socket, data, heading.bytes);
}

std::optional<Letter> Wire::receive(int from, Kind kind) {
  Peer& peer = peers_[static_cast<size_t>(from)];
  auto& letters = peer.letters[static_cast<size_t>(kind)];
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !letters.empty() || peer.gone || ended_; });
  if (letters.empty() && !ended_) {
    if (error_ == kSuccess)
      warn("rank " + std::to_string(own_) + " of " + std::to_string(size()) + " waits for rank " +
           std::to_string(from) + ", which has ended or left");
    error_ = kRemoteError;
    if (kind == Kind::kSplit) return std::nullopt;
    changed_.wait(lock, [&] { return ended_; });
  }
  if (ended_) return std::nullopt;
  Letter letter = std::move(letters.front());
  letters.pop_front();
  return letter;
}

Result Wire::error() {
  const std::lock_guard lock(mutex_);
  return error_;
}

void Wire::end() {
  const std::lock_guard lock(mutex_);
  ended_ = true;
  for (const Peer& peer : peers_)
    if (peer.socket >= 0) shutdown(peer.socket, SHUT_RDWR);
  changed_.notify_all();
}

bool Wire::isEnded() {
  const std::lock_guard lock(mutex_);
  return ended_;
}

}  // namespace fake::nccl
