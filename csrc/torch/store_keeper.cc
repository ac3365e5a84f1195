// A thread that counts the connections of a store's server.
#include "torch/store_keeper.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <filesystem>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/fd.h"
#include "base/limits.h"
#include "base/thread.h"

namespace ringreduce {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

constexpr Nanos kLookPeriod = 20 * kMillisecond;
// init_process_group puts this before the keys of the stores that it makes.
constexpr char kMadeByTorch[] = "default_pg/";

StorePtr rootOf(const StorePtr& store) {
  auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
  return prefixed ? prefixed->getUnderlyingNonPrefixStore() : store;
}

// The port of a TCPStore; 0 for other stores.
int portOf(const StorePtr& store) {
  const StorePtr root = store ? rootOf(store) : nullptr;
  const auto* tcp = dynamic_cast<const c10d::TCPStore*>(root.get());
  return tcp ? tcp->getPort() : 0;
}

struct Endpoint {
  std::string address;
  int port = 0;
  auto operator<=>(const Endpoint&) const = default;
};

// By getsockname or getpeername.  Port 0 for what is no connection of TCP.
Endpoint endpointOf(int fd, int (*ask)(int, sockaddr*, socklen_t*)) {
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  if (ask(fd, reinterpret_cast<sockaddr*>(&storage), &size) != 0) return {};
  char text[INET6_ADDRSTRLEN] = {};
  if (storage.ss_family == AF_INET) {
    const auto& four = reinterpret_cast<const sockaddr_in&>(storage);
    inet_ntop(AF_INET, &four.sin_addr, text, sizeof text);
    return {text, ntohs(four.sin_port)};
  }
  if (storage.ss_family != AF_INET6) return {};
  const auto& six = reinterpret_cast<const sockaddr_in6&>(storage);
  const bool is_four = IN6_IS_ADDR_V4MAPPED(&six.sin6_addr);
  if (is_four)
    inet_ntop(AF_INET, &six.sin6_addr.s6_addr[12], text, sizeof text);
  else
    inet_ntop(AF_INET6, &six.sin6_addr, text, sizeof text);
  return {text, ntohs(six.sin6_port)};
}

// The sockets of this process at a port.
struct PortUse {
  bool listens = false;
  std::set<Endpoint> others = {};  // the ends of its connections in other processes
  int own = 0;                     // connections from this process
};

PortUse useOf(int port) {
  PortUse use;
  std::set<Endpoint> own;
  std::vector<Endpoint> callers;
  std::error_code error;  // a descriptor that is closed meanwhile
  for (std::filesystem::directory_iterator entry("/proc/self/fd", error), end;
       !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    int fd = -1;
    std::from_chars(name.data(), name.data() + name.size(), fd);
    const Endpoint local = endpointOf(fd, &getsockname);
    if (local.port == 0) continue;
    own.insert(local);
    if (local.port != port) continue;
    const Endpoint peer = endpointOf(fd, &getpeername);
    if (peer.port != 0)
      callers.push_back(peer);
    else
      use.listens = true;
  }
  for (const Endpoint& caller : callers)
    if (own.contains(caller))
      ++use.own;
    else
      use.others.insert(caller);
  return use;
}

class StoreKeeper {
 public:
  // A group is about to be made on this store.
  void begin(const StorePtr& store) {
    const std::lock_guard calls(calls_mutex_);
    end();
    members_ = useOf(portOf(store)).others;
  }

  void keep(const StorePtr& store, Nanos longest) {
    const std::lock_guard calls(calls_mutex_);
    {
      const std::lock_guard lock(mutex_);
      if (store == store_) return;
    }
    end();
    const int port = portOf(store);
    const PortUse use = useOf(port);
    if (!use.listens) return;
    try {
      removeKeys(*store);
    } catch (const std::exception& error) {
      return log(std::string("the store ends with its group, since it does not answer: ") +
                 error.what());
    }
    store_ = store;
    stopping_ = false;
    try {
      thread_ = startThread(
          "ringreduce-keep", "that ends an unused store",
          [this, port, own = use.own, limit = deadlineIn(longest)] { watch(port, own, limit); });
    } catch (const Error& error) {  // the store is kept until the next group is made
      log(error.what());
    }
  }

  void end() {
    StorePtr last;  // its server ends without the lock
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      last = std::exchange(store_, nullptr);
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

 private:
  // Of the groups that end with this one.  In the next groups of the same names, another backend
  // would take the addresses there for its own.
  static void removeKeys(c10d::Store& store) {
    for (const std::string& key : store.listKeys())
      if (key.starts_with(kMadeByTorch)) store.deleteKey(key);
  }

  void watch(int port, int own, Nanos limit) {
    StorePtr last;  // its server ends without the lock
    std::unique_lock lock(mutex_);
    for (Nanos used = now(); now() - used < limits::kStoreUnused && now() < limit;) {
      const auto period = std::chrono::nanoseconds(kLookPeriod);
      if (changed_.wait_for(lock, period, [&] { return stopping_; })) return;
      const PortUse use = useOf(port);
      if (use.own > own) break;  // the store of the next group uses the server
      own = use.own;
      const auto is_new = [&](const Endpoint& other) { return !members_.contains(other); };
      if (std::ranges::any_of(use.others, is_new)) used = now();
    }
    // A rank that connects from here on is refused, or loses its connection before it has used it;
    // torch then connects again.
    last = std::exchange(store_, nullptr);
    lock.unlock();
  }

  std::mutex calls_mutex_;  // one call at a time
  std::thread thread_;
  // Connections from before the group was made, which need no server after rank 0 has left it.
  std::set<Endpoint> members_;
  std::mutex mutex_;  // of the rest
  std::condition_variable changed_;
  StorePtr store_;
  bool stopping_ = false;
};

StoreKeeper& storeKeeper() {
  static PerProcess<StoreKeeper> keepers;
  return *keepers.get([] {
    auto* made = new auto(std::make_shared<StoreKeeper>());  // never destroyed: its thread may run
    return *made;
  });
}

struct PrefixReader : c10d::PrefixStore {
  static const std::string& prefixOf(const c10d::PrefixStore& store) {
    return store.*(&PrefixReader::prefix_);
  }
};

}  // namespace

std::string prefixInTcpStore(const StorePtr& store) {
  if (portOf(store) == 0) return "";
  std::string all;
  for (StorePtr at = store; auto* prefixed = dynamic_cast<c10d::PrefixStore*>(at.get());
       at = prefixed->getUnderlyingStore())
    all.insert(0, PrefixReader::prefixOf(*prefixed) + "/");
  return all;
}

void keepStore(const StorePtr& store, Nanos longest) {
  storeKeeper().keep(rootOf(store), longest);
}

void beginOnStore(const StorePtr& store) {
  storeKeeper().begin(store);
}

void dropKeptStore() {
  storeKeeper().end();
}

}  // namespace ringreduce
