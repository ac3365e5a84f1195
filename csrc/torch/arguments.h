// Torch's arguments as the core's: dtypes, dense memory, reduce ops, timeouts.  Arguments
// that the core cannot take are refused here, with an error that names the call, before anything is
// sent.
#pragma once

#include <ATen/ATen.h>

#include <chrono>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "algorithm/cut.h"
#include "base/clock.h"
#include "base/dtype.h"
#include "torch/torch_calls.h"

namespace ringreduce {

// The GPU code of this build, as in "13.0, sm_80 sm_90 and newer"; empty if there is none.
std::string cudaBuild();
inline bool hasCuda() {
  return !cudaBuild().empty();
}
// Why there is none, as in "there is no nvcc in PATH"; the build writes it (CMakeLists.txt).
const char* cudaMissing();

// Throws Error(kArgument), with the call's name before it.
[[noreturn]] void refuse(const char* call, const std::string& why);

// Throws Error(kArgument) for a dtype the core does not know.
DType dtypeOf(const at::Tensor& tensor, const char* call);

// Refuses a tensor that is not in CPU memory, and says for a CUDA tensor what is missing.
void requireCpu(const at::Tensor& tensor, const char* call);

// Refuses anything but an ordinary tensor on `device`, where the call's other tensors are.
void requireDense(const at::Tensor& tensor, const char* call, c10::Device device = at::kCPU);

// Torch calls lists of tensors, one for each device; there is one.
const at::Tensor& onlyOne(const std::vector<at::Tensor>& tensors, const char* call,
                          c10::Device device = at::kCPU);

// Whether `part` is the `index`th part of `whole`, in the same memory and in one piece.
bool isPartOf(const at::Tensor& part, const at::Tensor& whole, int index);

// Whether two of the tensors may share a byte.  Compares first and last bytes only, so tensors that
// interleave count as sharing.
bool anyShareMemory(const std::vector<at::Tensor>& tensors);

// Refuses outputs of which two elements share a byte.  Which value stays would depend on the rank.
// Outputs that only interleave are taken.
void requireDisjoint(const std::vector<at::Tensor>& outputs, const char* call);

// The memory that a call writes to.  Each check of an input takes logarithmic time.
class OutputMemory {
 public:
  // All outputs of the call, which share no memory (requireDisjoint).
  OutputMemory(const std::vector<at::Tensor>& outputs, const char* call);
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
  void* data() const { return data_; }
  const at::Tensor& memory() const { return copy_.defined() ? copy_ : tensor_; }
  void giveBack() const;

 private:
  at::Tensor tensor_, copy_;  // the copy is undefined where none is needed
  void* data_;
  Use use_;
};

// ---- arguments

// "rank" or "ring"; Python has refused all others.
AddOrder orderNamed(const std::string& name);

// These refuse a negative timeout.  More than the clock can count means never.
Nanos nanosOf(double seconds);
Nanos nanosOf(std::chrono::milliseconds timeout);
// As Operation::timeout wants it: 0 for "the group's", which torch says by 0 or by kUnsetTimeout.
Nanos timeoutOf(std::chrono::milliseconds timeout);

ReduceOp opOf(const c10d::ReduceOp& op, const char* call);

// PREMUL_SUM's: a number, or a tensor with one.  1 for other ops.
struct Factor {
  double number = 1;
  at::Tensor tensor = {};
};
Factor factorOf(const c10d::ReduceOp& op);
double numberOf(const Factor& factor);

// The tensor as real numbers that can be added: pairs of them if it is complex.
at::Tensor addable(const at::Tensor& tensor, ReduceOp op, const char* call);

// Refuses a tensor that has not `elements` elements of `like`'s dtype.
void requireLike(const at::Tensor& tensor, int64_t elements, const at::Tensor& like,
                 const char* call, const char* what);

// The only list of a list of lists, with `size` tensors.
const Tensors& onlyList(const std::vector<Tensors>& lists, size_t size, const char* call,
                        const char* what);

void requireTag(int tag, const char* call);

// Refuses an empty list.
void requireSome(const Tensors& tensors, const char* call);
// Refuses lists of which one is longer, or that are empty.
void requirePairs(const Tensors& outputs, const Tensors& inputs, const char* call);

inline size_t countOf(const at::Tensor& tensor) {
  return static_cast<size_t>(tensor.numel());
}

// Elements of each rank's part, by rank, where all have `count`.
inline std::vector<size_t> equalCounts(size_t count, int world_size) {
  return std::vector<size_t>(static_cast<size_t>(world_size), count);
}

// `memory` cut into consecutive parts.
template <class Pointer>
std::vector<Pointer> partsOf(void* memory, const std::vector<size_t>& counts, size_t width) {
  std::vector<Pointer> parts;
  auto* at = static_cast<std::byte*>(memory);
  for (size_t count : counts) {
    parts.push_back(at);
    at += count * width;
  }
  return parts;
}

// Memory for small tensors that travel as one message.  It is kept for later messages.
class Buffers : public std::enable_shared_from_this<Buffers> {
 public:
  static constexpr size_t kBytes = 1 << 20;  // of a buffer that is kept

  // At least so many bytes.  They go back when the last pointer to them ends.
  std::shared_ptr<at::Tensor> take(size_t bytes);

 private:
  static constexpr size_t kMostKept = 32;

  std::mutex mutex_;
  std::vector<at::Tensor> kept_;
};

// Tensors that an operation works on, each in dense memory until the operation is over.
class StagedList {
 public:
  // Returns where the tensor's elements are.
  void* add(const at::Tensor& tensor, Staged::Use use, const char* call) {
    return list_.emplace_back(tensor, use, call).data();
  }
  void giveBack() const {
    for (const Staged& staged : list_) staged.giveBack();
  }

 private:
  std::vector<Staged> list_;
};

}  // namespace ringreduce
