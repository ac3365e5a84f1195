// The DDP communication hooks in C++, exact and compressed: a bucket goes from the reducer to the
// group's queue and back without the interpreter.
#pragma once

#include <cstddef>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <unordered_map>
#include <vector>

#include "group/compression.h"
#include "torch/work.h"

namespace ringreduce {

// The group whose ringreduce backend averages buckets.  The backend is called directly, so these
// functions call torch's hooks on the group's collectives: the flight recorder and the NaN check.
struct AveragingGroup {
  c10::intrusive_ptr<c10d::Backend> backend;
  c10::intrusive_ptr<c10d::ProcessGroup> group;
};

// Averages a bucket over the group's ranks, in place; the Future's value is the bucket's tensor.
c10::intrusive_ptr<c10::ivalue::Future> averageGradBucket(const AveragingGroup& group,
                                                          c10d::GradBucket& bucket);

// ---- compressed gradients (group/compression.h)

// The state of a hook from step to step.  It identifies parameters by their tensors but does not
// hold them: they live as long as the model, and the last reference to one needs the interpreter.
class HookState {
 public:
  HookState(const CompressionSettings& settings, const std::vector<at::Tensor>& parameters,
            const std::vector<bool>& exact, const std::vector<uint64_t>& names);

  // Averages a bucket over the group's ranks, in place; the Future's value is its tensor.
  c10::intrusive_ptr<c10::ivalue::Future> average(const AveragingGroup& group,
                                                  c10d::GradBucket& bucket);

  Compression& core() { return core_; }

 private:
  Compression core_;
  std::unordered_map<const c10::TensorImpl*, size_t> numbers_;
};

// From now on `reducer` averages its buckets over `group`: exactly, or by way of `state`.
void registerCommHook(c10d::Reducer& reducer, AveragingGroup group,
                      std::shared_ptr<HookState> state = nullptr);

}  // namespace ringreduce
