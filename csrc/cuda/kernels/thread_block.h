// A thread block, as the algorithms see it: threads that move data side by side and meet at
// barriers.
//
// The algorithms are templates on this.  Tests run them on the host, with a thread a thread and
// memory accesses that are counted or recorded (tests/cpp/host_block.h); on a GPU it is
// DeviceBlock.
//
//     thread(), threads()        the index of this thread, and their number
//     sync()                 all threads have come here, and each sees what the others wrote before
//     any(x)                 the same, and whether x is true on any thread
//     load(p), store(p, v)   data, of up to 16 bytes and aligned to its size
//     see(x), show(x, v)     a value in memory that the block's threads share
//     nanoseconds()          a clock, for deadlines
//     pause()                between two looks at a flag
#pragma once

#include <cstdint>

#include "base/bytes.h"

namespace ringreduce::cuda {

// The bytes that one thread moves at once: the widest access of a GPU.
struct alignas(16) Pack {
  uint32_t words[4];
};

#ifdef __CUDACC__

// The number of threads is known when it is compiled, so that the packs of a thread lie at fixed
// offsets from each other, in the instruction, instead of each having an address in two registers.
template <int count>
struct DeviceBlock {
  __device__ int thread() const { return static_cast<int>(threadIdx.x); }
  __device__ static constexpr int threads() { return count; }
  __device__ void sync() const { __syncthreads(); }
  __device__ bool any(bool x) const { return __syncthreads_or(x) != 0; }

  // Plain accesses.  A slot is read after an acquire and a barrier; __restrict__ on it would let
  // the compiler use the read-only cache, which neither of the two clears.
  template <class T>
  __device__ T load(const T* from) const {
    return *from;
  }
  __device__ Pack load(const Pack* from) const {
    const uint4 raw = *reinterpret_cast<const uint4*>(from);
    return {{raw.x, raw.y, raw.z, raw.w}};
  }
  template <class T>
  __device__ void store(T* to, T value) const {
    *to = value;
  }
  __device__ void store(Pack* to, Pack value) const {
    *reinterpret_cast<uint4*>(to) =
        make_uint4(value.words[0], value.words[1], value.words[2], value.words[3]);
  }

  template <class T>
  __device__ T see(const T& shared) const {
    return shared;
  }
  template <class T>
  __device__ void show(T& shared, T value) const {
    shared = value;
  }

  __device__ static uint64_t nanoseconds() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
  }
  __device__ static void pause() {}
};

#endif

}  // namespace ringreduce::cuda
