// The flags of the slot protocol, and their memory orders.
//
// A flag is a 64-bit counter with one writer; it only grows.  Stores of the writer before
// `publish(n)` are visible to a thread that then observes n or more.  Nothing else orders memory:
// data never carries a flag, so any bit pattern may be sent.
//
// `HostRules` holds the memory orders.  On the host both are sequentially consistent: a rank that
// goes to sleep must see a publication, or the publisher must see it asleep (wait.h), which
// release/acquire does not promise.  On a GPU, where nothing sleeps, they are release and acquire
// (cuda/kernels/ordering.h).  Tests replace the rules by random delays, and by mutants that must be
// caught: `Rules` is the most derived struct.
//
// x86-64: a publication is XCHG, a full barrier; an observation is MOV, since loads stay in order.
// glibc's memcpy ends its non-temporal stores with SFENCE, so slots are visible before the flag.
//
// AArch64: a publication is STLR, an observation LDAR.  All earlier loads and stores of the thread
// come before its STLR, all later ones after its LDAR.  An LDAR does not pass an earlier STLR of
// the thread, so no DMB is needed.  The non-temporal LDNP and STNP are ordered so too.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/bytes.h"

namespace ringreduce {

struct HostRules {
  static constexpr auto kPublish = std::memory_order_seq_cst;
  static constexpr auto kObserve = std::memory_order_seq_cst;
  template <class Rules>
  static void store(uint64_t& flag, uint64_t n) {
    std::atomic_ref(flag).store(n, Rules::kPublish);
  }
  template <class Rules>
  static uint64_t load(uint64_t& flag) {
    return std::atomic_ref(flag).load(Rules::kObserve);
  }
  static constexpr uint64_t kEarlyReuse = 0;  // a mutant fills a slot this many steps too early
  static constexpr bool kWakes = true;        // a mutant does not wake sleeping ranks
  static void delay() {}                      // tests sleep here, at every step of the protocol
};

// Each flag has its own pair of cache lines: processors prefetch neighbouring lines.  Longer lines
// than 128 bytes (A64FX has 256) are slower, not wrong.
inline constexpr size_t kLine = 128;

struct alignas(kLine) Flag {
  uint64_t value;

  template <class Rules = HostRules>
  RINGREDUCE_DEVICE void publish(uint64_t n) {
    Rules::delay();
    Rules::template store<Rules>(value, n);
  }
  template <class Rules = HostRules>
  RINGREDUCE_DEVICE uint64_t observe() {
    Rules::delay();
    return Rules::template load<Rules>(value);
  }
};

// Whether a counter has reached n.  Counters may wrap around 2^64: the distance is compared, which
// is less than 2^63 in either direction.
constexpr bool reached(uint64_t counter, uint64_t n) {
  return static_cast<int64_t>(counter - n) >= 0;
}
static_assert(reached(5, 5) && reached(6, 5) && !reached(4, 5));
static_assert(reached(0, ~uint64_t{0}) && !reached(~uint64_t{0}, 0));
static_assert(reached(2, ~uint64_t{0} - 3) && !reached(~uint64_t{0} - 3, 2));

static_assert(sizeof(Flag) == kLine);
static_assert(std::atomic_ref<uint64_t>::is_always_lock_free);

}  // namespace ringreduce
