// The kernels of float32 and float64.
#include "cuda/kernels/kernels.cuh"

namespace ringreduce::cuda {

template const Kernels& compiled<DType::kFloat32>();
template const Kernels& compiled<DType::kFloat64>();

}  // namespace ringreduce::cuda
