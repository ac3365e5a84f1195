// torch's handle on an operation: c10d::Work over a Ticket of the core.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "group/group.h"

namespace ringreduce {

// Makes what stands behind an error's text; called only if there is one.  May be null.
using Context = std::function<std::string()>;

// What there is to do besides the core's operation.
struct Job {
  c10d::OpType type;
  const char* title;                     // for the profiler: "ringreduce:all_reduce"
  std::vector<at::Tensor> inputs = {};   // for the profiler
  std::vector<at::Tensor> outputs = {};  // the Future's value
  Operation operation = {};
  Context context = {};        // behind an error's text: the DDP bucket
  bool future_of_one = false;  // the Future's value is the tensor itself (hooks), not a list
};

class Work final : public c10d::Work {
 public:
  // Blocking: the operation has run when this returns, in this thread if it could.  Throws its
  // error. Else it is queued.
  static c10::intrusive_ptr<Work> start(Group& group, Job job, bool blocking);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override {}  // a finished CPU operation needs nothing more
  void abort() override;
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return sequence_; }

  Work(Group& group, const Job& job);

 private:
  void complete(std::exception_ptr error);

  const std::weak_ptr<Group> group_;
  const std::vector<at::Tensor> outputs_;
  const Context context_;
  const uint64_t sequence_;
  const bool future_of_one_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::atomic<bool> completed_once_{false};
  std::shared_ptr<Ticket> ticket_;  // null: it ran in the caller's thread and is over
};

}  // namespace ringreduce
