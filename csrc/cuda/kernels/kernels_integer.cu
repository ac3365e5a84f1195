// The kernels of integers and bool.
#include "cuda/kernels/kernels.cuh"

namespace ringreduce::cuda {

template const Kernels& compiled<DType::kInt8>();
template const Kernels& compiled<DType::kUInt8>();
template const Kernels& compiled<DType::kBool>();
template const Kernels& compiled<DType::kInt16>();
template const Kernels& compiled<DType::kInt32>();
template const Kernels& compiled<DType::kInt64>();

}  // namespace ringreduce::cuda
