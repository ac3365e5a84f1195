// Finds a dtype's kernels, and compiles those that serve all dtypes.
#include <cuda_runtime_api.h>

#include "base/error.h"
#include "cuda/gpu_device.h"
#include "cuda/kernels/kernels.cuh"

namespace ringreduce::cuda {
namespace {

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

extern template const Kernels& compiled<DType::kFloat32>();
extern template const Kernels& compiled<DType::kFloat64>();
extern template const Kernels& compiled<DType::kFloat16>();
extern template const Kernels& compiled<DType::kBFloat16>();
extern template const Kernels& compiled<DType::kInt8>();
extern template const Kernels& compiled<DType::kUInt8>();
extern template const Kernels& compiled<DType::kInt16>();
extern template const Kernels& compiled<DType::kInt32>();
extern template const Kernels& compiled<DType::kInt64>();
extern template const Kernels& compiled<DType::kBool>();

const Kernels& kernelsOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return compiled<DType::kFloat32>();
    case DType::kFloat64:
      return compiled<DType::kFloat64>();
    case DType::kFloat16:
      return compiled<DType::kFloat16>();
    case DType::kBFloat16:
      return compiled<DType::kBFloat16>();
    case DType::kInt8:
      return compiled<DType::kInt8>();
    case DType::kUInt8:
      return compiled<DType::kUInt8>();
    case DType::kInt16:
      return compiled<DType::kInt16>();
    case DType::kInt32:
      return compiled<DType::kInt32>();
    case DType::kInt64:
      return compiled<DType::kInt64>();
    case DType::kBool:
      return compiled<DType::kBool>();
    default:
      throw Error(Failure::kArgument, std::string("no GPU kernel adds elements of ") + name(dtype));
  }
}

const void* deliverKernel() {
  return pointerTo(deliverKernelOfAll);
}

const void* gatherKernel(int unit) {
  static const void* const kernels[kUnits] = {
      pointerTo(gatherKernelOf<0>), pointerTo(gatherKernelOf<1>), pointerTo(gatherKernelOf<2>)};
  return kernels[unit];
}

const void* carryKernel(int unit) {
  static const void* const kernels[kUnits] = {
      pointerTo(carryKernelOf<0>), pointerTo(carryKernelOf<1>), pointerTo(carryKernelOf<2>)};
  return kernels[unit];
}

// ---- what all of this was compiled for

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
