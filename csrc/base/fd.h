// File descriptors that close themselves, also in a forked child.
//
// A forked child (a DataLoader worker, say) inherits every descriptor of its parent.  If it kept
// ours, a dead rank's sockets would look open for as long as the child lives.  So every Fd is on a
// list that a pthread_atfork handler closes in the child, where groups cannot be used (see
// inForkedChild).
#pragma once

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

 private:
  int fd_ = -1;
  int generation_ = 0;  // forks behind us when it was opened: a child must not close it twice
};

// How many forks lie between the process that loaded this library and the calling one.
int forkGeneration();

}  // namespace ringreduce
