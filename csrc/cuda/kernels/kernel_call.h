// The arguments of a kernel: the rank's communicator, in device memory, and one call.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "cuda/kernels/device_layout.h"
#include "cuda/kernels/ordering.h"
#include "cuda/kernels/place.h"
#include "cuda/kernels/reduce_n.h"

namespace ringreduce::cuda {

// Why a rank's kernels gave up.  kMismatch: a peer is in another call, or its tensor reaches beyond
// its segment.
enum class Cause : uint32_t { kNone, kTimeout, kAborted, kMismatch };

// Hosts set it, in their memory, to end a rank's kernels.  It has many copies, since a GPU fetches
// a line of host memory for one block at a time: an H200 takes 1.0 us for each.
struct AbortFlag {
  static constexpr int kCopies = 256;
  Flag copies[kCopies];

  // The copy by which a kernel's last block decides whether the output is poisoned.  It comes
  // before the others, so a block that sees its copy can see this one.
  void setFirst() { std::atomic_ref(copies[0].value).store(1, std::memory_order_release); }
  void set() {
    if (std::atomic_ref(copies[kCopies - 1].value).load(std::memory_order_acquire) != 0) return;
    for (Flag& copy : copies) std::atomic_ref(copy.value).store(1, std::memory_order_release);
  }
  RINGREDUCE_DEVICE bool isSet(int block) {
    return observeWord(copies[block % kCopies].value) != 0;
  }
};

// The failure of a rank's kernels, in memory that its host reads.  The first block to give up
// writes it, `cause` last.
struct alignas(kLine) Trouble {
  uint64_t cause;      // a Cause
  uint64_t operation;  // RankCall's
  uint64_t step;       // of the pipe or the exchange
  int32_t peer;        // the rank that was waited for
  int32_t channel;
};

// A channel's counters, from one kernel to the next.  They lie in device memory, so that a kernel
// that a CUDA graph replays goes on from them.
struct alignas(kLine) Counters {
  uint64_t sent, received;  // messages of the ring's pipes
  uint64_t parts, results;  // steps of the push exchange
  uint64_t ll;              // calls by LL
};

// Used by this rank's own kernels only.
struct Local {
  alignas(kLine) uint32_t cause;        // a Cause: not kNone from the first failure on
  alignas(kLine) uint32_t blocks_done;  // of the kernel that runs
  float found_inf;                      // 0; 1 from the first failed call on, for optimizers
  Counters counters[kMostChannels];
};

struct DeviceComm {
  int rank, size;
  DeviceLayout layout;
  std::byte* base[kMostRanks];  // each rank's memory (device_layout.h), as mapped here
  Local* local;
  AbortFlag* abort;     // in the hosts' memory
  Trouble* trouble;     // in the host's memory
  SegmentEntry* table;  // in device memory, of kMostSegments for each rank (place.h); may be null
};

struct RankCall {
  const DeviceComm* comm;  // in device memory
  const void* input;
  void* output;  // may be the input, or lie in it, or it in this
  size_t count;  // elements; of one rank's part where there are parts
  Arithmetic arithmetic;
  const void* factor;    // in device memory, of the dtype's Value type: replaces arithmetic.factor
  uint64_t timeout;      // nanoseconds from the kernel's start
  uint64_t operation;    // its number in the group, for messages
  size_t slice;          // elements (gpu_tuning.h): of a ring slice, or of a part pushed
  size_t window;         // ring: slices under way
  bool scatter;          // two-shot: its first half, located too; broadcast: in two hops
  unsigned char poison;  // fills the output of a failed call (guard.h)
  int root;              // the rank that sends, or kEverybody
};

// A block's part of the tensors of all ranks, as mapped here, in the block's shared memory.
struct PeerTensors {
  const std::byte* input[kMostRanks];
  std::byte* output[kMostRanks];
};

}  // namespace ringreduce::cuda
