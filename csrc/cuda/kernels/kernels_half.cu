// The kernels of float16 and bfloat16.
#include "cuda/kernels/kernels.cuh"

namespace ringreduce::cuda {

template const Kernels& compiled<DType::kFloat16>();
template const Kernels& compiled<DType::kBFloat16>();

}  // namespace ringreduce::cuda
