// The list of open descriptors, and the fork handlers that close them in a child.
#include "base/fd.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

namespace ringreduce {
namespace {

struct Registry {
  std::mutex mutex;
  std::vector<int> open;
  std::atomic<int> generation{0};

  Registry() {
    pthread_atfork([] { instance().mutex.lock(); }, [] { instance().mutex.unlock(); },
                   [] {
                     Registry& self = instance();
                     for (int fd : self.open) ::close(fd);
                     self.open.clear();
                     self.generation.fetch_add(1);
                     self.mutex.unlock();
                   });
  }

  // Never destroyed: threads and static objects may still close descriptors at exit.
  static Registry& instance() {
    static Registry* registry = new Registry;
    return *registry;
  }
};

}  // namespace

Fd::Fd(int fd) : fd_(fd) {
  if (fd < 0) return;
  Registry& registry = Registry::instance();
  const std::lock_guard lock(registry.mutex);
  registry.open.push_back(fd);
  generation_ = registry.generation;
}

void Fd::reset() {
  if (fd_ < 0) return;
  Registry& registry = Registry::instance();
  const std::lock_guard lock(registry.mutex);
  if (generation_ == registry.generation) {
    const auto found = std::find(registry.open.begin(), registry.open.end(), fd_);
    if (found != registry.open.end()) registry.open.erase(found);
    ::close(fd_);
  }
  fd_ = -1;
}

int forkGeneration() {
  return Registry::instance().generation;
}

}  // namespace ringreduce
