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

// Whether some byte may belong to both; by their first and last bytes, so interleaved ones do too.
bool shareMemory(const at::Tensor& a, const at::Tensor& b);

bool anyShareMemory(const std::vector<at::Tensor>& tensors);

// Whether `part` is the `index`th part of `whole`, in the same memory and in one piece.
bool isPartOf(const at::Tensor& part, const at::Tensor& whole, int index);

// The input, or a copy of it if a call that writes to `outputs` could overwrite it while it is
// read. `in_place`: an output that lies in the input's memory by intent, so that each element is
// read before it is written.
at::Tensor apart(const at::Tensor& input, const std::vector<at::Tensor>& outputs,
                 const at::Tensor& in_place = {});
std::vector<at::Tensor> apart(std::vector<at::Tensor> inputs,
                              const std::vector<at::Tensor>& outputs);

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
