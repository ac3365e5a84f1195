// Somebody on the way between ranks: every connection to a rank goes through a relay in that rank's
// process, which hears all, and changes a bit where a test wants it.
//
// Ranks learn of the relay by the store: whoever can change packets could do the same by ARP.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "bootstrap/store.h"
#include "check.h"

namespace relay {

using ringreduce::Fd;

class Relay {
 public:
  Relay() : listener_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = loopback(0);
    socklen_t size = sizeof address;
    CHECK(bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), size) == 0);
    CHECK(listen(listener_.get(), 64) == 0);
    CHECK(getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &size) == 0);
    port_ = ntohs(address.sin_port);
  }
  ~Relay() { stop(); }

  uint16_t port() const { return port_; }
  void start(uint16_t target) {
    target_ = target;
    thread_ = std::thread([this] { run(); });
  }
  void stop() {
    stopping_ = true;
    if (thread_.joinable()) thread_.join();
  }
  // From now on a bit is changed in the middle of the next packet of so many bytes.
  void spoil(size_t bytes) { spoiled_from_ = bytes; }
  bool hasSpoilt() const { return spoilt_; }
  bool heard(const std::string& words) {
    const std::lock_guard lock(mutex_);
    return heard_.find(words) != std::string::npos;
  }

 private:
  static sockaddr_in loopback(uint16_t port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
  }

  struct Way {
    std::shared_ptr<Fd> from, to;
    bool over = false;
  };

  void run() {
    while (!stopping_) {
      std::vector<pollfd> wanted{{.fd = listener_.get(), .events = POLLIN, .revents = 0}};
      for (const Way& way : ways_)
        wanted.push_back({.fd = way.over ? -1 : way.from->get(), .events = POLLIN, .revents = 0});
      if (poll(wanted.data(), wanted.size(), 20) <= 0) continue;
      for (size_t i = 0; i + 1 < wanted.size(); ++i)
        if (wanted[i + 1].revents != 0) carry(ways_[i]);
      if (wanted[0].revents != 0) accept();
    }
    ways_.clear();
  }
  void accept() {
    auto here = std::make_shared<Fd>(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    auto there = std::make_shared<Fd>(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const sockaddr_in address = loopback(target_);
    if (!*here ||
        connect(there->get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
      return;
    for (const auto& fd : {here, there}) {
      const int on = 1;
      setsockopt(fd->get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    }
    ways_.push_back({here, there});
    ways_.push_back({there, here});
  }
  void carry(Way& way) {
    char bytes[64 << 10];
    const ssize_t n = recv(way.from->get(), bytes, sizeof bytes, 0);
    if (n <= 0) {
      way.over = true;
      shutdown(way.to->get(), SHUT_WR);
      return;
    }
    const auto size = static_cast<size_t>(n);
    if (const size_t least = spoiled_from_; least > 0 && size >= least && !spoilt_.exchange(true))
      bytes[size / 2] = static_cast<char>(bytes[size / 2] ^ 1);
    {
      const std::lock_guard lock(mutex_);
      heard_.append(bytes, size);
    }
    for (size_t at = 0; at < size;) {
      const ssize_t sent = send(way.to->get(), bytes + at, size - at, MSG_NOSIGNAL);
      if (sent < 0 && errno != EINTR) break;
      at += static_cast<size_t>(std::max<ssize_t>(sent, 0));
    }
  }

  Fd listener_;
  uint16_t port_ = 0, target_ = 0;
  std::atomic<bool> stopping_ = false, spoilt_ = false;
  std::atomic<size_t> spoiled_from_ = 0;
  std::vector<Way> ways_;
  std::mutex mutex_;
  std::string heard_;
  std::thread thread_;
};

// What a rank writes into the store of its own address names the relay instead.
class RelayedStore final : public ringreduce::Store {
 public:
  RelayedStore(ringreduce::Store& store, uint16_t own_port, uint16_t relay_port)
      : store_(store), own_(text(own_port)), relays_(text(relay_port)) {}
  void set(const std::string& key, const std::string& value) override {
    std::string changed = value;
    if (const size_t at = changed.find(own_); at != std::string::npos)
      changed.replace(at, own_.size(), relays_);
    store_.set(key, changed);
  }
  std::optional<std::string> get(const std::string& key) override { return store_.get(key); }
  void remove(const std::string& key) override { store_.remove(key); }

 private:
  static std::string text(uint16_t port) {
    return std::string("127.0.0.1:").append(std::to_string(port)).append("|");
  }
  ringreduce::Store& store_;
  const std::string own_, relays_;
};

}  // namespace relay
