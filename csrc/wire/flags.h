// The flags of the slot protocol, and the one place that says how memory is ordered.
//
// A flag is a 64-bit counter with one writer; it only grows.  What the writer stored before
// `publish(n)` is seen by whoever then observes n or more.  Nothing else orders anything: data
// never carries a flag, so any bit pattern may be sent.
//
// `HostRules` holds the memory orders.  On the host both are sequentially consistent, because a
// rank that goes to sleep must see a publication or be seen asleep by the publisher (wait.h), which
// release/acquire does not promise; on x86-64 that costs one locked store and nothing for loads.
// Tests replace the rules by random delays, and by mutants that must be caught.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace ringreduce {

struct HostRules {
  static constexpr auto kPublish = std::memory_order_seq_cst;
  static constexpr auto kObserve = std::memory_order_seq_cst;
  static constexpr uint64_t kEarlyReuse = 0;  // a mutant fills a slot this many steps too early
  static constexpr bool kWakes = true;        // a mutant does not wake who sleeps
  static void delay() {}                      // tests sleep here, at every step of the protocol
};

// Each flag has a pair of cache lines of its own: processors fetch neighbouring lines together.
inline constexpr size_t kLine = 128;

struct alignas(kLine) Flag {
  uint64_t value;

  template <class Rules = HostRules>
  void publish(uint64_t n) {
    Rules::delay();
    std::atomic_ref(value).store(n, Rules::kPublish);
  }
  template <class Rules = HostRules>
  uint64_t observe() {
    Rules::delay();
    return std::atomic_ref(value).load(Rules::kObserve);
  }
};

static_assert(sizeof(Flag) == kLine);
static_assert(std::atomic_ref<uint64_t>::is_always_lock_free);

}  // namespace ringreduce
