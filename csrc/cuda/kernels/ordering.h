// How memory is ordered on a GPU, and the few atomic words that its threads share.
//
// Flags between ranks: `publish` is a release store and `observe` an acquire load, both at system
// scope, since the other side may be another GPU.  One thread of a block publishes, after
// a block barrier; the release then also covers the stores of the other threads before that barrier
// (PTX: barriers synchronise, releases are cumulative).  One thread observes; after the next block
// barrier all threads see the published data.  There are no separate fences, which ThreadSanitizer
// does not model.
//
// LL's words (ll.h) order nothing: a word of 8 bytes has both the data and its flag.  That they may
// be written again follows from flags of the kind above, which are published when a kernel starts.
//
// Words of one GPU (a rank's verdict, its count of finished blocks) are read and changed at the
// device's scope.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/bytes.h"
#include "cuda/kernels/device_layout.h"

namespace ringreduce::cuda {

struct DeviceRules {
  static constexpr auto kPublish = std::memory_order_release;
  static constexpr auto kObserve = std::memory_order_acquire;
  static constexpr uint64_t kEarlyReuse = 0;  // see transport/shm/flags.h
  static constexpr uint64_t kSets = 4;        // of push slots; a mutant has too few (push.h)
  static constexpr uint64_t kLLSets = cuda::kLLSets;  // the same (ll.h)
  RINGREDUCE_DEVICE static void delay() {}

  template <class Rules>
  RINGREDUCE_DEVICE static void store(uint64_t& flag, uint64_t n) {
#ifdef __CUDA_ARCH__
    asm volatile("st.release.sys.u64 [%0], %1;" ::"l"(&flag), "l"(n) : "memory");
#else
    std::atomic_ref(flag).store(n, Rules::kPublish);
#endif
  }
  template <class Rules>
  RINGREDUCE_DEVICE static uint64_t load(uint64_t& flag) {
#ifdef __CUDA_ARCH__
    uint64_t n;
    asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(n) : "l"(&flag) : "memory");
    return n;
#else
    return std::atomic_ref(flag).load(Rules::kObserve);
#endif
  }

  // A word in the line of a flag, written before the flag is published and read after it was
  // observed; and one of a table that is read so.
  template <class Rules>
  RINGREDUCE_DEVICE static void say(uint64_t& word, uint64_t value) {
    word = value;
  }
  template <class Rules>
  RINGREDUCE_DEVICE static uint64_t hear(const uint64_t& word) {
    return word;
  }

  // Two words that carry their own flags.  Each is stored and loaded whole, in no order with
  // anything else (PTX: a vector is accessed as its elements are).
  template <class Rules>
  RINGREDUCE_DEVICE static void storeWords(uint64_t* to, uint64_t first, uint64_t second) {
#ifdef __CUDA_ARCH__
    asm volatile("st.relaxed.sys.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(first), "l"(second)
                 : "memory");
#else
    for (const uint64_t word : {first, second}) {
      Rules::delay();
      std::atomic_ref(*to++).store(word, std::memory_order_relaxed);
    }
#endif
  }
  template <class Rules>
  RINGREDUCE_DEVICE static void loadWords(uint64_t* from, uint64_t& first, uint64_t& second) {
#ifdef __CUDA_ARCH__
    asm volatile("ld.relaxed.sys.v2.u64 {%0, %1}, [%2];"
                 : "=l"(first), "=l"(second)
                 : "l"(from)
                 : "memory");
#else
    first = std::atomic_ref(from[0]).load(std::memory_order_relaxed);
    second = std::atomic_ref(from[1]).load(std::memory_order_relaxed);
#endif
  }
};

// A word that the host may set while kernels run, or the other way round.
RINGREDUCE_DEVICE inline uint64_t observeWord(uint64_t& word) {
  return DeviceRules::load<DeviceRules>(word);
}
RINGREDUCE_DEVICE inline void publishWord(uint64_t& word, uint64_t value) {
  DeviceRules::store<DeviceRules>(word, value);
}

// A word that streams set and wait for (direct_schedule.h), the first of its line: a GPU loads 8
// bytes, as of all flags.
RINGREDUCE_DEVICE inline uint32_t observeStreamWord(uint32_t& word) {
#ifdef __CUDA_ARCH__
  uint64_t value;
  asm volatile("ld.acquire.sys.u64 %0, [%1];" : "=l"(value) : "l"(&word) : "memory");
  return static_cast<uint32_t>(value);
#else
  return std::atomic_ref(word).load(std::memory_order_acquire);
#endif
}

// A rank's own word, shared by its blocks: as it is now, in no order with anything else.
RINGREDUCE_DEVICE inline uint32_t peekWord(uint32_t& word) {
#ifdef __CUDA_ARCH__
  uint32_t value;
  asm volatile("ld.relaxed.gpu.u32 %0, [%1];" : "=r"(value) : "l"(&word) : "memory");
  return value;
#else
  return std::atomic_ref(word).load(std::memory_order_relaxed);
#endif
}

// Sets a word that is 0; returns whether this call set it.
RINGREDUCE_DEVICE inline bool claimWord(uint32_t& word, uint32_t value) {
#ifdef __CUDA_ARCH__
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.cas.b32 %0, [%1], 0, %2;"
               : "=r"(old)
               : "l"(&word), "r"(value)
               : "memory");
  return old == 0;
#else
  uint32_t zero = 0;
  return std::atomic_ref(word).compare_exchange_strong(zero, value, std::memory_order_acq_rel);
#endif
}

// Adds one and returns the value before.  The block that counts last sees the work of all blocks
// that counted earlier.
RINGREDUCE_DEVICE inline uint32_t countWord(uint32_t& word) {
#ifdef __CUDA_ARCH__
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.add.u32 %0, [%1], 1;" : "=r"(old) : "l"(&word) : "memory");
  return old;
#else
  return std::atomic_ref(word).fetch_add(1, std::memory_order_acq_rel);
#endif
}

}  // namespace ringreduce::cuda
