// The DDP hook that compresses gradients: group/compression.h for the buckets of a model of
// torch's.
#pragma once

#include <cstddef>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <unordered_map>
#include <vector>

#include "group/compression.h"

namespace ringreduce {

// What a hook keeps from step to step.  It knows parameters by their tensors, which it does not
// hold: they live as long as the model, and the last reference to one needs the interpreter.
class HookState {
 public:
  HookState(const CompressionSettings& settings, const std::vector<at::Tensor>& parameters,
            const std::vector<bool>& exact, const std::vector<uint64_t>& names);

  // Averages a bucket over the backend's ranks, in place; the Future's value is its tensor.
  c10::intrusive_ptr<c10::ivalue::Future> average(c10d::Backend& backend, c10d::GradBucket& bucket);

  Compression& core() { return core_; }

 private:
  Compression core_;
  std::unordered_map<const c10::TensorImpl*, size_t> numbers_;
};

// From now on `reducer` averages its buckets over `backend`, a ringreduce one, by way of `state`.
void registerCompressedHook(c10d::Reducer& reducer, c10::intrusive_ptr<c10d::Backend> backend,
                            std::shared_ptr<HookState> state);

}  // namespace ringreduce
