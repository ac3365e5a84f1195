// The two methods of interleavings.h in a test, and programs written out by hand.
#pragma once

#include <cstdio>

#include "check.h"
#include "every_state.h"
#include "happens_before.h"
#include "interleavings.h"

namespace interleavings {

using Do = Step::Do;

inline Step reads(size_t at, size_t size = 1) {
  return {.what = Do::kAccess, .reads = {{at, at + size}}};
}
inline Step writes(size_t at, size_t size = 1) {
  return {.what = Do::kAccess, .writes = {{at, at + size}}};
}
inline Step publishes(size_t flag, uint64_t n, bool orders = true) {
  return {.what = Do::kPublish, .at = flag, .n = n, .orders = orders};
}
inline Step waits(size_t flag, uint64_t n, bool orders = true) {
  return {.what = Do::kWait, .at = flag, .n = n, .orders = orders};
}
inline Step on(Do what, size_t at) {
  return {.what = what, .at = at};
}

// Both methods must agree on what can be seen without memory orders.
inline Explored everyState(const char* what, const Program& program) {
  const Explored found = explore(program);
  std::printf("%-58s %9llu states\n", what, static_cast<unsigned long long>(found.states));
  return found;
}
inline void holds(const char* what, const Program& program) {
  const Order proof = order(program);
  CHECK_EQ(proof.wrong, "");
  CHECK(proof.races.empty());
  const Explored found = everyState(what, program);
  CHECK(!found.race);
  CHECK(!found.deadlock);
  CHECK(!found.lost_signal);
}
inline void races(const char* what, const Program& program) {
  CHECK(!order(program).races.empty());
  CHECK(everyState(what, program).race);
}

}  // namespace interleavings
