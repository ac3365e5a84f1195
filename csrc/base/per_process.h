// Something of which a process has one for as long as somebody uses it.
//
// A forked child has another: the parent's threads are not there, and its mutex may have been held
// by one of them.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#include "base/fd.h"

namespace ringreduce {

// At static storage, constant-initialised and never destroyed: users may outlive static objects.
template <class T>
class PerProcess {
 public:
  // The one there is, or what `make` returns.  Calls for it one at a time.
  template <class Make>
  std::shared_ptr<T> get(Make make) {
    Slot& slot = ofThisProcess();
    const std::lock_guard lock(slot.mutex);
    if (auto known = slot.one.lock()) return known;
    std::shared_ptr<T> made = make();
    slot.one = made;
    return made;
  }

 private:
  struct Slot {
    const int generation = forkGeneration();
    std::mutex mutex;
    std::weak_ptr<T> one;
  };

  Slot& ofThisProcess() {
    Slot* known = current_.load();
    while (!known || known->generation != forkGeneration()) {
      auto* fresh = new Slot;  // the parent's is left to itself
      if (current_.compare_exchange_strong(known, fresh)) return *fresh;
      delete fresh;
    }
    return *known;
  }

  std::atomic<Slot*> current_{nullptr};
};

}  // namespace ringreduce
