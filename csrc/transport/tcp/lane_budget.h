// How many connections the transports of a process may have beyond the one that each rank needs:
// what a fast stream is given more for speed must not leave the program without descriptors.
#pragma once

#include <sys/resource.h>

#include <algorithm>
#include <atomic>

namespace ringreduce::net {

// A transport's part of it.
class LaneBudget {
 public:
  LaneBudget() = default;
  ~LaneBudget() { taken_in_all_ -= taken_; }
  LaneBudget(const LaneBudget&) = delete;
  LaneBudget& operator=(const LaneBudget&) = delete;

  // Whether there may be one more.
  bool take() {
    if (taken_in_all_++ < most()) {
      ++taken_;
      return true;
    }
    --taken_in_all_;
    return false;
  }

  // The other ranks have as many towards this one, and the program is to have the half.
  static int most() {
    rlimit limit{};
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 0;
    return static_cast<int>(std::min<rlim_t>(limit.rlim_cur / 4, 1 << 20));
  }

 private:
  static inline std::atomic<int> taken_in_all_ = 0;
  int taken_ = 0;
};

}  // namespace ringreduce::net
