// How the benchmarks of kernels time: the fastest of many short runs.
#pragma once

#include <algorithm>
#include <chrono>

namespace ringreduce {

// Seconds that one call of `body` takes, in the fastest of `repetitions` runs.  A run is about 1
// ms: short enough that, on a busy machine too, some of them are not interrupted.
template <class Body>
double secondsOf(int repetitions, Body body) {
  using Clock = std::chrono::steady_clock;
  const auto timed = [&](int calls) {
    const auto start = Clock::now();
    for (int i = 0; i < calls; ++i) body();
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  int calls = 1;
  while (timed(calls) < 0.0005) calls *= 2;
  double best = 1e9;
  for (int i = 0; i < repetitions; ++i) best = std::min(best, timed(2 * calls) / (2 * calls));
  return best;
}

}  // namespace ringreduce
