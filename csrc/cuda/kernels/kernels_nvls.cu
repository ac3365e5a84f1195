// The kernels that add in the NVSwitch.
#include "cuda/kernels/kernels.cuh"
#include "cuda/kernels/nvls.h"

namespace ringreduce::cuda {

template <DType dtype>
RINGREDUCE_KERNEL nvlsKernelOf(const __grid_constant__ NvlsLaunch launch) {
  SwitchBlock block;
  nvlsBlock<Element<dtype>, DeviceRules>(block, launch.comm, launch.call, launch.window,
                                         static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
}

const void* nvlsKernel(DType dtype) {
  static const void* const kernels[] = {pointerTo(nvlsKernelOf<DType::kFloat32>),
                                        pointerTo(nvlsKernelOf<DType::kFloat16>),
                                        pointerTo(nvlsKernelOf<DType::kBFloat16>)};
  return kernels[dtype == DType::kFloat32 ? 0 : dtype == DType::kFloat16 ? 1 : 2];
}

}  // namespace ringreduce::cuda
