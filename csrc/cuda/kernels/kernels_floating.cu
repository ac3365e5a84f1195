// The kernels of floating-point elements, in a file of their own: nvcc compiles both files at once.
#include "cuda/kernels/kernels.cuh"

namespace ringreduce::cuda {

template const Kernels& compiled<DType::kFloat32>();
template const Kernels& compiled<DType::kFloat64>();
template const Kernels& compiled<DType::kFloat16>();
template const Kernels& compiled<DType::kBFloat16>();

}  // namespace ringreduce::cuda
