// The kernels of the wider integers.
#include "cuda/kernels/kernels.cuh"

namespace ringreduce::cuda {

template const Kernels& compiled<DType::kInt16>();
template const Kernels& compiled<DType::kInt32>();
template const Kernels& compiled<DType::kInt64>();

}  // namespace ringreduce::cuda
