// Time: nanoseconds of the monotonic clock, and deadlines.
#pragma once

#include <chrono>
#include <cstdint>
#include <limits>

namespace ringreduce {

using Nanos = int64_t;

inline constexpr Nanos kMicrosecond = 1'000;
inline constexpr Nanos kMillisecond = 1'000'000;
inline constexpr Nanos kSecond = 1'000'000'000;
inline constexpr Nanos kNever = std::numeric_limits<Nanos>::max();

inline Nanos now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// `after` nanoseconds from `start`; never, if that is beyond the clock's range.
inline Nanos deadlineIn(Nanos after, Nanos start = now()) {
  return after > kNever - start ? kNever : start + after;
}

}  // namespace ringreduce
