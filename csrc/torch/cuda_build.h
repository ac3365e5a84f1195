// This build's GPU support, for Python and for the error on a CUDA tensor.
#pragma once

#include <ATen/ATen.h>

#include <string>

namespace ringreduce {

// As in "13.0, sm_80 sm_90 and newer"; empty where no code for GPUs was built.
std::string cudaBuild();
inline bool hasCuda() {
  return !cudaBuild().empty();
}

// Refuses tensors that are not in CPU memory, and says for CUDA tensors what would have to be
// there.
void requireCpu(const at::Tensor& tensor, const char* call);

}  // namespace ringreduce
