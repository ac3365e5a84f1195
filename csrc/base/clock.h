// Time: the clock of this process in nanoseconds, and deadlines.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>

namespace ringreduce {

using Nanos = int64_t;

inline constexpr Nanos kMicrosecond = 1'000;
inline constexpr Nanos kMillisecond = 1'000'000;
inline constexpr Nanos kSecond = 1'000'000'000;
inline constexpr Nanos kNever = std::numeric_limits<Nanos>::max();

// CLOCK_MONOTONIC, to measure how long work took.
inline Nanos monotonicNow() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// The clock of all waits: CLOCK_MONOTONIC without the time for which the process was stopped
// (SIGSTOP, Ctrl-Z, a frozen cgroup, a debugger).  A job that is stopped as a whole for longer than
// a timeout goes on: no rank takes its own stop for the delay of another.
//
// Nothing tells a process how long it was stopped.  But a wait looks at the clock many times a
// second.  So if no thread has looked for longer than kLongestGap, either the process was stopped
// or no thread waited.  Such a gap counts as about kLongestGap, not as zero: a wait whose every
// round calls a function that blocks for longer must still end.
//
// A wait must not sleep for longer than kLongestGap between two looks.  The reactor does not.
class ProcessClock {
 public:
  static constexpr int kTickBits = 26;                         // a tick has 67 ms
  static constexpr Nanos kLongestGap = Nanos{7} << kTickBits;  // about 0.47 s

  // Lock-free: also called by a signal handler.  `read` is the underlying clock.
  template <class Read>
  Nanos now(Read read) {
    uint64_t state = state_.load(std::memory_order_relaxed);
    for (;;) {
      // Read after `state`: a gap between the two belongs to this look, or the exchange fails.
      const Nanos time = read();
      const uint64_t ticks = static_cast<uint64_t>(time) >> kTickBits;
      const uint64_t seen = state >> kMissedBits;
      if (ticks <= seen) return time - missedOf(state);
      const uint64_t gap = seen == 0 ? 0 : ticks - seen;
      const uint64_t missed = (state & kMostMissed) + (gap > kMostTicks ? gap - kMostTicks : 0);
      const uint64_t next = ticks << kMissedBits | std::min(missed, kMostMissed);
      if (state_.compare_exchange_weak(state, next, std::memory_order_relaxed))
        return time - missedOf(next);
    }
  }

 private:
  // One word holds the time of the latest look (34 bits, 36 years) and the sum of what did not
  // count (30 bits, 2 years), both in ticks of 67 ms.
  static constexpr int kMissedBits = 30;
  static constexpr uint64_t kMostMissed = (uint64_t{1} << kMissedBits) - 1;
  static constexpr uint64_t kMostTicks = kLongestGap >> kTickBits;

  static Nanos missedOf(uint64_t state) {
    return static_cast<Nanos>((state & kMostMissed) << kTickBits);
  }

  std::atomic<uint64_t> state_{0};
};

inline constinit ProcessClock process_clock;

inline Nanos now() {
  return process_clock.now(monotonicNow);
}

// The same; `monotonic` becomes CLOCK_MONOTONIC at that moment.
inline Nanos now(Nanos& monotonic) {
  return process_clock.now([&] { return monotonic = monotonicNow(); });
}

// The clock of a group, on which its ranks compare times: CLOCK_MONOTONIC of rank 0's host.  The
// other hosts measure how far theirs is ahead of it (control/clock_offset.h).
struct ClockOffset {
  Nanos ahead = 0;       // CLOCK_MONOTONIC here minus the group's clock
  Nanos error = kNever;  // `ahead` is off by this much at most; kNever: it is not known yet

  bool isKnown() const { return error != kNever; }
  bool operator==(const ClockOffset&) const = default;
};

// `after` nanoseconds from `start`; never, if that is beyond the clock's range.
inline Nanos deadlineIn(Nanos after, Nanos start = now()) {
  return after > kNever - start ? kNever : start + after;
}

}  // namespace ringreduce
