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

struct Kernels {
  const void* all_reduce[kDeviceAlgorithms];  // by DeviceAlgorithm; takes a RanksLaunch
  const void* direct;                         // takes a DirectCall
  const void* copy_in;                        // takes a CopyCall
  const void* ring_step;                      // takes a RingStepCall
};

// The dtypes that kernels.cu compiles kernels for: the first of DType.
inline constexpr int kKernelDTypes = 10;
const Kernels& kernelsOf(DType dtype);
// For all dtypes; takes a DeliverCall.
const void* deliverKernel();
// For all dtypes of a unit (gpu_tuning.h).
const void* gatherKernel(int unit);  // takes a RanksLaunch
const void* carryKernel(int unit);   // takes a CarryCall

}  // namespace ringreduce::cuda
