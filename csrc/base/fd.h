// Open descriptors and objects of which a process has one: a fork must not copy either.
//
// A forked child (a DataLoader worker, say) inherits every descriptor of its parent.  If it kept
// them, a dead rank's sockets would look open for as long as the child lives.  So a pthread_atfork
// handler closes every Fd in the child, where groups cannot be used.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

namespace ringreduce {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd);  // takes ownership; -1 is "none"
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)), generation_(other.generation_) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
      generation_ = other.generation_;
    }
    return *this;
  }
  ~Fd() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset();
  int release() { return std::exchange(fd_, -1); }  // the caller's to close

 private:
  int fd_ = -1;
  int generation_ = 0;  // forks before it was opened: a child must not close it twice
};

// How many forks lie between the process that loaded this library and this one.
int forkGeneration();

// An object that a process has one of, as long as it is in use.  A forked child makes its own: the
// parent's threads are not there, and one of them may have held its mutex.
//
// For static storage: constant-initialised and never destroyed, since users may outlive statics.
template <class T>
class PerProcess {
 public:
  // The existing object, else the result of `make`; one call of `make` at a time.
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
      auto* fresh = new Slot;  // the parent's stays as it is
      if (current_.compare_exchange_strong(known, fresh)) return *fresh;
      delete fresh;
    }
    return *known;
  }

  std::atomic<Slot*> current_{nullptr};
};

}  // namespace ringreduce
