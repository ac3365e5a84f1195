// The __global__ functions, for the files that compile them dtype by dtype (kernels_*.cu).
#pragma once

#include "cuda/kernels/kernel_table.h"

namespace ringreduce::cuda {

using Block = DeviceBlock<kThreads>;

// Two blocks fit a multiprocessor, so that several kernels that wait for their peers are on a GPU
// at once, beside the kernels of a backward pass (gpu_tuning.h).  That leaves a thread 128
// registers.
#define RINGREDUCE_KERNEL __global__ void __launch_bounds__(kThreads, 2)

template <DeviceAlgorithm algorithm, DType dtype>
RINGREDUCE_KERNEL allReduceKernel(const __grid_constant__ RanksLaunch launch) {
  using E = Element<dtype>;
  const int blocks = static_cast<int>(gridDim.x) / launch.ranks;
  const int rank = static_cast<int>(blockIdx.x) / blocks;
  const int channel = static_cast<int>(blockIdx.x) % blocks;
  // Shared: the rarely needed arguments then take no registers.
  __shared__ RankCall call;
  if (threadIdx.x == 0) {
    call = launch.calls[rank];
    readFactor<E>(call);
  }
  __syncthreads();
  Block block;
  allReduceBlock<algorithm, E, DeviceRules>(block, *call.comm, call, channel, blocks);
}

template <DeviceAlgorithm algorithm, DType dtype, int ranks>
RINGREDUCE_KERNEL fixedKernel(const __grid_constant__ RankLaunch launch) {
  Block block;
  allReduceBlock<algorithm, Element<dtype>, DeviceRules, ranks>(
      block, launch.comm, launch.call, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
}

template <DType dtype, int ranks>
RINGREDUCE_KERNEL llKernel(const __grid_constant__ RankLaunch launch) {
  Block block;
  llBlock<Element<dtype>, DeviceRules, ranks>(
      block, launch.comm, launch.call, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
}

template <int unit>
RINGREDUCE_KERNEL locatedGatherKernelOf(const __grid_constant__ RankLaunch launch) {
  __shared__ PeerTensors peers;
  Block block;
  locatedGatherBlock<unitBytes(unit), DeviceRules>(block, launch.comm, launch.call, launch.location,
                                                   peers, static_cast<int>(blockIdx.x),
                                                   static_cast<int>(gridDim.x));
}

// Of any number of ranks, too: `ranks` is 0.
template <DType dtype, int ranks>
RINGREDUCE_KERNEL locatedKernel(const __grid_constant__ RankLaunch launch) {
  __shared__ PeerTensors peers;
  Block block;
  const auto run = [&](const RankCall& call) {
    locatedBlock<Element<dtype>, DeviceRules, ranks>(block, launch.comm, call, launch.location,
                                                     peers, static_cast<int>(blockIdx.x),
                                                     static_cast<int>(gridDim.x));
  };
  if constexpr (ranks > 0) return run(launch.call);
  RankCall call = launch.call;
  readFactor<Element<dtype>>(call);
  run(call);
}

template <DType dtype>
RINGREDUCE_KERNEL directKernel(const __grid_constant__ DirectCall call) {
  __shared__ PeerTensors peers;
  Block block;
  direct<Element<dtype>>(block, call, peers, static_cast<int>(blockIdx.x),
                         static_cast<int>(gridDim.x));
}

template <DType dtype>
RINGREDUCE_KERNEL copyInKernel(const __grid_constant__ CopyCall call) {
  Block block;
  copyIn<Element<dtype>>(block, call, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
}

template <DType dtype>
RINGREDUCE_KERNEL ringStepKernel(const __grid_constant__ RingStepCall call) {
  Block block;
  addRingStep<Element<dtype>>(block, call, static_cast<int>(blockIdx.x),
                              static_cast<int>(gridDim.x));
}

#ifdef __CUDACC__  // tests that compile this by the C++ compiler bring their own
template <class Kernel>
const void* pointerTo(Kernel* kernel) {
  return reinterpret_cast<const void*>(kernel);
}
#endif

template <DType dtype, int ranks>
FixedKernels fixedKernels() {
  if constexpr (hasFixedKernels(dtype))
    return {pointerTo(fixedKernel<DeviceAlgorithm::kOneShot, dtype, ranks>),
            pointerTo(fixedKernel<DeviceAlgorithm::kTwoShot, dtype, ranks>),
            pointerTo(locatedKernel<dtype, ranks>), pointerTo(llKernel<dtype, ranks>)};
  else
    return {};
}

template <DeviceAlgorithm algorithm, DType dtype>
const void* allReduceOf() {
  if constexpr (hasKernel(algorithm, dtype))
    return pointerTo(allReduceKernel<algorithm, dtype>);
  else
    return nullptr;
}

template <DType dtype>
const Kernels& compiled() {
  static const Kernels kernels{
      {allReduceOf<DeviceAlgorithm::kOneShot, dtype>(),
       allReduceOf<DeviceAlgorithm::kTwoShot, dtype>(),
       allReduceOf<DeviceAlgorithm::kRing, dtype>()},
      {fixedKernels<dtype, fixedRanks(0)>(), fixedKernels<dtype, fixedRanks(1)>(),
       fixedKernels<dtype, fixedRanks(2)>()},
      pointerTo(locatedKernel<dtype, 0>),
      pointerTo(directKernel<dtype>),
      pointerTo(copyInKernel<dtype>),
      pointerTo(ringStepKernel<dtype>)};
  return kernels;
}

}  // namespace ringreduce::cuda
