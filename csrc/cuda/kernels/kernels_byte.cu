// The kernels of one-byte elements.
#include "cuda/kernels/kernels.cuh"

namespace ringreduce::cuda {

template const Kernels& compiled<DType::kInt8>();
template const Kernels& compiled<DType::kUInt8>();
template const Kernels& compiled<DType::kBool>();

}  // namespace ringreduce::cuda
