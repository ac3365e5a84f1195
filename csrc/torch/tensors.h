// Tensors as the core sees them: a dtype and dense memory.  Everything else is refused here, with
// an error that names the call, before anything is sent.
#pragma once

#include <ATen/ATen.h>

#include <cstddef>
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

// Whether `part` is the `index`th part of `whole`, in the same memory and in one piece.
bool isPartOf(const at::Tensor& part, const at::Tensor& whole, int index);

// Whether two of the tensors may share a byte.  Compares first and last bytes only, so tensors that
// interleave count as sharing.
bool anyShareMemory(const std::vector<at::Tensor>& tensors);

// The memory that a call writes to.  Each question about an input takes logarithmic time.
class OutputMemory {
 public:
  explicit OutputMemory(const std::vector<at::Tensor>& outputs);
  bool overlaps(const at::Tensor& input, const at::Tensor* in_place = nullptr) const;
  // Returns a copy of an input that overlaps an output, and any other input as it is.  `in_place`:
  // an output that may overlap, because each element is read before it is written.
  at::Tensor copyIfShared(const at::Tensor& input, const at::Tensor* in_place = nullptr) const;
  std::vector<at::Tensor> copyIfShared(std::vector<at::Tensor> inputs) const;

 private:
  struct Extent {
    const std::byte *begin, *end;
    const void* tensor;
    const std::byte* furthest;  // the largest `end` up to and including this one
  };
  std::vector<Extent> extents_;  // by their beginning
};

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
