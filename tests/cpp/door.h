// A process's way in, for tests: a group with one rank here, who gets in, and those who dial, or
// are dialled, in ways in which no rank would.
#pragma once

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "transport/tcp/acceptor.h"
#include "transport/tcp/reactor.h"

namespace door {

using namespace ringreduce;
using namespace ringreduce::net;

// Who was let in.
class Inbox {
 public:
  using Entry = std::pair<Socket, PeerHello>;

  Acceptor::Taken taken() {
    return [this](Socket socket, const PeerHello& caller) {
      const std::lock_guard lock(mutex_);
      entries_.emplace_back(std::move(socket), caller);
      changed_.notify_all();
    };
  }
  Entry next() {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::seconds(60), [&] { return !entries_.empty(); }))
      throw std::runtime_error("nobody was let in");
    Entry entry = std::move(entries_.front());
    entries_.erase(entries_.begin());
    return entry;
  }
  size_t size() {
    const std::lock_guard lock(mutex_);
    return entries_.size();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Entry> entries_;
};

inline PeerHello callerOf(const std::string& group, int from = 0, int to = 1) {
  return {.group = group, .from = from, .to = to, .purpose = Purpose::kData, .connection = 7};
}

// A group with one rank here.
struct Group {
  Group() = default;
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  const std::string word = randomGroup();
  const Secret secret = randomSecret();
  std::shared_ptr<Acceptor> acceptor = Acceptor::shared("");
  Inbox inbox;
  std::shared_ptr<void> token;

  // The reactor's thread may still hold the acceptor, while it ends what it was at; the next test
  // would get that one, with what it has complained of already.
  ~Group() {
    const std::shared_ptr<Reactor> reactor = Reactor::shared();
    token.reset();
    acceptor.reset();
    reactor->run([] {});
  }

  void admit(int to = 1) { token = acceptor->admit(word, to, secret, inbox.taken()); }
  Socket dial(const DialOptions& options = {}) const {
    return net::dial(acceptor->endpoint(), callerOf(word), secret, options, "rank 1");
  }
};

inline Fd rawSocket(const Address& address) {
  Fd fd(socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd || connect(fd.get(), address.get(), address.length()) != 0)
    throwErrno(Failure::kSetup, "a test cannot connect");
  return fd;
}

inline void sendAll(const Fd& fd, const std::string& bytes) {
  send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
}

// What comes until the other end has closed; blocks.
inline std::string receiveAll(const Fd& fd) {
  std::string all;
  for (;;) {
    pollfd wanted{.fd = fd.get(), .events = POLLIN, .revents = 0};
    if (poll(&wanted, 1, 60'000) <= 0) throw std::runtime_error("nothing comes");
    char bytes[512];
    const ssize_t got = recv(fd.get(), bytes, sizeof bytes, 0);
    if (got <= 0) return all;
    all.append(bytes, static_cast<size_t>(got));
  }
}

inline std::string receiveSome(const Fd& fd, size_t size) {
  std::string all;
  while (all.size() < size) {
    pollfd wanted{.fd = fd.get(), .events = POLLIN, .revents = 0};
    if (poll(&wanted, 1, 60'000) <= 0) throw std::runtime_error("nothing comes");
    std::string bytes(size - all.size(), '\0');
    const ssize_t got = recv(fd.get(), bytes.data(), bytes.size(), 0);
    if (got <= 0) break;
    all.append(bytes, 0, static_cast<size_t>(got));
  }
  return all;
}

inline bool isUsable(const Fd& fd) {
  int nodelay = 0;
  socklen_t size = sizeof nodelay;
  getsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &nodelay, &size);
  const int flags = fcntl(fd.get(), F_GETFL), own = fcntl(fd.get(), F_GETFD);
  return nodelay != 0 && (flags & O_NONBLOCK) && (own & FD_CLOEXEC);
}

inline size_t openFds() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<size_t>(std::distance(begin(all), end(all)));
}

template <class Condition>
void await(Condition condition) {
  for (const Nanos deadline = deadlineIn(60 * kSecond); !condition();) {
    if (now() > deadline) throw std::runtime_error("it does not come about");
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

inline std::string failure(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    CHECK(error.kind() == Failure::kSetup);
    return error.what();
  }
  return "";
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// Collects what is written to standard error.
class Log {
 public:
  Log() : memory_(memfd_create("log", MFD_CLOEXEC)), before_(dup(2)) { dup2(memory_.get(), 2); }
  ~Log() { dup2(before_.get(), 2); }
  std::string text() const {
    std::string all(1 << 16, '\0');
    all.resize(static_cast<size_t>(pread(memory_.get(), all.data(), all.size(), 0)));
    return all;
  }
  size_t lines() const {
    const std::string all = text();
    return static_cast<size_t>(std::count(all.begin(), all.end(), '\n'));
  }

 private:
  Fd memory_, before_;
};

// A listening socket without an acceptor behind it.
struct Other {
  Listener listener = listenOn({*Address::parse("127.0.0.1:0")}, {});
  Fd accept() const {
    pollfd wanted{.fd = listener.sockets[0].get(), .events = POLLIN, .revents = 0};
    poll(&wanted, 1, 60'000);
    Fd fd(accept4(listener.sockets[0].get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!fd) throw std::runtime_error("nobody dials");
    return fd;
  }
  Endpoint endpoint() const { return {listener.addresses}; }
};

// An address that takes no connection: its queue of them is full, and what comes is dropped.
struct Hole {
  Hole() : listener(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const Address any = *Address::parse("127.0.0.1:0");
    bind(listener.get(), any.get(), any.length());
    listen(listener.get(), 0);
    sockaddr_storage name{};
    socklen_t size = sizeof name;
    getsockname(listener.get(), reinterpret_cast<sockaddr*>(&name), &size);
    address = Address(reinterpret_cast<sockaddr*>(&name), size);
    for (int i = 0; i < 4; ++i) {
      fill.emplace_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
      connect(fill.back().get(), address.get(), address.length());
    }
  }
  Fd listener;
  Address address;
  std::vector<Fd> fill;
};

// An address where nobody listens.
inline Address deserted() {
  return listenOn({*Address::parse("127.0.0.1:0")}, {}).addresses[0];
}

}  // namespace door
