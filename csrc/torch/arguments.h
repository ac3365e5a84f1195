// Torch's arguments as the core's: reduce ops, timeouts, lists of tensors.
#pragma once

#include <ATen/ATen.h>

#include <chrono>
#include <string>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <vector>

#include "base/clock.h"
#include "base/dtype.h"
#include "torch/tensors.h"

namespace ringreduce {

using Tensors = std::vector<at::Tensor>;

Nanos nanosOf(std::chrono::milliseconds time);
// As Operation::timeout wants it: 0 for "the group's".
Nanos timeoutOf(std::chrono::milliseconds timeout);

ReduceOp opOf(const c10d::ReduceOp& op, const char* call);

// PREMUL_SUM's: a number, or a tensor with one.  1 for other ops.
struct Factor {
  double number = 1;
  at::Tensor tensor = {};
};
Factor factorOf(const c10d::ReduceOp& op);
double numberOf(const Factor& factor);

// What can be added of a tensor: of a complex one the pairs of real numbers.
at::Tensor addable(const at::Tensor& tensor, ReduceOp op, const char* call);

// Refuses a tensor that has not `elements` elements of `like`'s dtype.
void requireLike(const at::Tensor& tensor, int64_t elements, const at::Tensor& like,
                 const char* call, const char* what);

// The only list of a list of lists, with `size` tensors.
const Tensors& onlyList(const std::vector<Tensors>& lists, size_t size, const char* call,
                        const char* what);

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
