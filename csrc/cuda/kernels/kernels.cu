// The table of kernels by dtype, the kernels that serve all dtypes, and the facts about the build.
#include <cuda_runtime_api.h>

#include "base/error.h"
#include "cuda/gpu_device.h"
#include "cuda/kernels/kernels.cuh"

namespace ringreduce::cuda {
namespace {

RINGREDUCE_KERNEL lookKernelOfAll(const __grid_constant__ LookCall call) {
  Block block;
  Look<DeviceRules, Block>(block, call).run();
}

RINGREDUCE_KERNEL deliverKernelOfAll(const __grid_constant__ DeliverCall call) {
  Block block;
  deliver(block, call, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
}

template <int unit>
RINGREDUCE_KERNEL gatherKernelOf(const __grid_constant__ RanksLaunch launch) {
  const int blocks = static_cast<int>(gridDim.x) / launch.ranks;
  const int rank = static_cast<int>(blockIdx.x) / blocks;
  const int channel = static_cast<int>(blockIdx.x) % blocks;
  __shared__ RankCall call;
  if (threadIdx.x == 0) call = launch.calls[rank];
  __syncthreads();
  Block block;
  gatherBlock<unitBytes(unit), DeviceRules>(block, call, channel, blocks);
}

template <int unit>
RINGREDUCE_KERNEL carryKernelOf(const __grid_constant__ CarryCall call) {
  Block block;
  carry<unitBytes(unit)>(block, call, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
}

}  // namespace

// All dtypes that can be reduced.
#define RINGREDUCE_REDUCIBLE(F) \
  F(kFloat32)                   \
  F(kFloat64) F(kFloat16) F(kBFloat16) F(kInt8) F(kUInt8) F(kInt16) F(kInt32) F(kInt64) F(kBool)

#define RINGREDUCE_DECLARE(dtype) extern template const Kernels& compiled<DType::dtype>();
RINGREDUCE_REDUCIBLE(RINGREDUCE_DECLARE)
#undef RINGREDUCE_DECLARE

const Kernels& kernelsOf(DType dtype) {
  switch (dtype) {
#define RINGREDUCE_CASE(dtype) \
  case DType::dtype:           \
    return compiled<DType::dtype>();
    RINGREDUCE_REDUCIBLE(RINGREDUCE_CASE)
#undef RINGREDUCE_CASE
    default:
      throw Error(Failure::kArgument, std::string("no GPU kernel adds elements of ") + name(dtype));
  }
}

const void* lookKernel() {
  return pointerTo(lookKernelOfAll);
}

const void* deliverKernel() {
  return pointerTo(deliverKernelOfAll);
}

const void* gatherKernel(int unit) {
  static const void* const kernels[kUnits] = {
      pointerTo(gatherKernelOf<0>), pointerTo(gatherKernelOf<1>), pointerTo(gatherKernelOf<2>)};
  return kernels[unit];
}

const void* locatedGatherKernel(int unit) {
  static const void* const kernels[kUnits] = {pointerTo(locatedGatherKernelOf<0>),
                                              pointerTo(locatedGatherKernelOf<1>),
                                              pointerTo(locatedGatherKernelOf<2>)};
  return kernels[unit];
}

const void* carryKernel(int unit) {
  static const void* const kernels[kUnits] = {
      pointerTo(carryKernelOf<0>), pointerTo(carryKernelOf<1>), pointerTo(carryKernelOf<2>)};
  return kernels[unit];
}

// ---- the build

std::string BuildInfo::text() const {
  std::string text =
      std::to_string(toolkit / 1000) + "." + std::to_string(toolkit % 1000 / 10) + ",";
  for (const int architecture : architectures) text += " sm_" + std::to_string(architecture);
  return text + " and newer";
}

BuildInfo buildInfo() {
  BuildInfo info{CUDART_VERSION, {__CUDA_ARCH_LIST__}};  // 800,900: tens of ours
  for (int& architecture : info.architectures) architecture /= 10;
  return info;
}

}  // namespace ringreduce::cuda
