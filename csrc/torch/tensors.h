// Tensors as the core sees them: a dtype and dense memory.  Everything else is refused here, with
// an error that names the call, before anything is sent.
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <vector>

#include "base/dtype.h"

namespace ringreduce {

// Throws Error(kArgument), with the call's name before it.
[[noreturn]] void refuse(const char* call, const std::string& why);

// Throws Error(kArgument) for a dtype the core does not know.
DType dtypeOf(const at::Tensor& tensor, const char* call);

// Refuses what is not an ordinary tensor on `device`, where the call's other tensors are.
void requireDense(const at::Tensor& tensor, const char* call, c10::Device device = at::kCPU);

// Torch calls lists of tensors, one for each device; there is one.
const at::Tensor& onlyOne(const std::vector<at::Tensor>& tensors, const char* call,
                          c10::Device device = at::kCPU);

// Contiguous memory for a tensor that is written to: its own, or a copy that `giveBack` writes
// back. Whatever strides a tensor has, its elements travel in their logical order.
class Staged {
 public:
  enum class Use { kRead, kWrite, kBoth };
  Staged(at::Tensor tensor, Use use, const char* call);
  void* data() const { return memory_.data_ptr(); }
  const at::Tensor& memory() const { return memory_; }
  void giveBack() const;

 private:
  at::Tensor tensor_, memory_;
  Use use_;
};

}  // namespace ringreduce
