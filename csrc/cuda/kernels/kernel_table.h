// The kernels, as pointers for the runtime to launch: all of kThreads threads, any number of
// blocks.
#pragma once

#include "base/dtype.h"
#include "cuda/kernels/gpu_tuning.h"
#include "cuda/kernels/stream_kernels.h"

namespace ringreduce::cuda {

// One or more ranks of this process; each has as many blocks of the grid as any other, the first
// rank the first of them.  They wait for each other, so they must all be resident at once: one
// launch of several ranks is to be a cooperative one.
struct RanksLaunch {
  int ranks;
  RankCall calls[kMostRanksOfLaunch];
};

// One rank, with its communicator.  The compiler knows that no store changes an argument, so it
// loads the addresses of peers once, from the constant memory of arguments.
struct RankLaunch {
  DeviceComm comm;
  RankCall call;
  Location location;  // of calls on tensors where they are
};

// Sizes that kernels are compiled for: 2, 4 and 8 ranks, by the logarithm less 1.
inline constexpr int kFixedSizes = 3;
constexpr int fixedRanks(int size) {
  return 2 << size;
}
// The place of such a size; -1 if there is none.
constexpr int fixedSizeOf(int ranks) {
  return ranks == 2 ? 0 : ranks == 4 ? 1 : ranks == 8 ? 2 : -1;
}

// The dtypes of gradients.  Others have the kernels of any number of ranks only.
constexpr bool hasFixedKernels(DType dtype) {
  return dtype == DType::kFloat32 || isHalf(dtype);
}

// Integers and truth values are nearly always small counters, so they have two-shot alone, which
// reduce-scatter takes too: one-shot and the ring of them would be a sixth of the library.
constexpr bool hasKernel(DeviceAlgorithm algorithm, DType dtype) {
  return algorithm == DeviceAlgorithm::kTwoShot || isFloating(dtype);
}

// For SUM, and AVG over all ranks, of such dtypes: each takes a RankLaunch.
struct FixedKernels {
  const void* one_shot;
  const void* two_shot;  // reduce-scatter too
  const void* located;   // reduce-scatter too
  const void* ll;        // one-shot of small messages
};

struct Kernels {
  const void* all_reduce[kDeviceAlgorithms];  // each takes a RanksLaunch; null without hasKernel
  FixedKernels fixed[kFixedSizes];            // null for other dtypes
  const void* located;                        // takes a RankLaunch
  const void* direct;                         // takes a DirectCall
  const void* copy_in;                        // takes a CopyCall
  const void* ring_step;                      // takes a RingStepCall
};

// The dtypes that kernels.cu compiles kernels for: the first of DType.
inline constexpr int kKernelDTypes = 10;
const Kernels& kernelsOf(DType dtype);
// For all dtypes.
const void* lookKernel();     // takes a LookCall; of one block
const void* deliverKernel();  // takes a DeliverCall
// For all dtypes of a unit (gpu_tuning.h).
const void* gatherKernel(int unit);         // takes a RanksLaunch
const void* locatedGatherKernel(int unit);  // takes a RankLaunch
const void* carryKernel(int unit);          // takes a CarryCall

}  // namespace ringreduce::cuda
