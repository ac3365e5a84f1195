// torch's NCCL backend as a part of a group.
//
// It ends with the group: NCCL does not notice that a rank of this host is lost, and never lets go
// of a GPU by itself.  So a thread looks after the ranks as long as this exists, fails the group if
// one is lost, and aborts NCCL when the group has failed.  It looks less and less often after the
// last call has begun; whether that is still under way, only CUDA knows, which may not answer.
// Calls and Works then raise the group's error, which names the rank.  Outputs of calls that were
// under way are undefined.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "group/group.h"
#include "torch/torch_calls.h"
#include "torch/work.h"

namespace ringreduce {

// Throws the group's error, if there is one, as Python's.
class FailedGroup {
 public:
  FailedGroup(const std::shared_ptr<Group>& group, std::shared_ptr<Observer> observer)
      : group_(group), observer_(std::move(observer)), observed_group_(observer_->groups()) {}
  void check() const;
  // Runs a call of NCCL, of whose errors the group may know the cause.
  template <class F>
  auto explain(F&& call) const {
    check();
    try {
      return call();
    } catch (const c10::DistBackendError&) {
      awaitFailure();
      check();
      throw;
    }
  }
  std::shared_ptr<Group> group() const { return group_.lock(); }

 private:
  void awaitFailure() const;

  const std::weak_ptr<Group> group_;
  const std::shared_ptr<Observer> observer_;
  const uint64_t observed_group_;
};

class InnerNccl final : public c10d::Backend {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  InnerNccl(BackendPtr nccl, const std::shared_ptr<Group>& group,
            std::shared_ptr<Observer> observer);
  ~InnerNccl() override;

  const std::string getBackendName() const override { return nccl_->getBackendName(); }

#define RINGREDUCE_PASS_ON(name, Out, In, Options, type, title)                   \
  WorkPtr name(Out& outputs, In& inputs, const c10d::Options& options) override { \
    return start([&] { return nccl_->name(outputs, inputs, options); });          \
  }
  RINGREDUCE_CALLS_FROM_TO(RINGREDUCE_PASS_ON)
#undef RINGREDUCE_PASS_ON
#define RINGREDUCE_PASS_ON(name, Options, type, title)                    \
  WorkPtr name(Tensors& tensors, const c10d::Options& options) override { \
    return start([&] { return nccl_->name(tensors, options); });          \
  }
  RINGREDUCE_CALLS_IN_PLACE(RINGREDUCE_PASS_ON)
#undef RINGREDUCE_PASS_ON
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override {
    return start(
        [&] { return nccl_->alltoall_base(output, input, output_splits, input_splits, options); });
  }
  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    return start([&] { return nccl_->send(tensors, peer, tag); });
  }
  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    return start([&] { return nccl_->recv(tensors, peer, tag); });
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return start([&] { return nccl_->recvAnysource(tensors, tag); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return start([&] { return nccl_->barrier(options); });
  }
  void startCoalescing() override { nccl_->startCoalescing(); }
  WorkPtr endCoalescing() override {
    return start([&] { return nccl_->endCoalescing(); });
  }

  void setTimeout(std::chrono::milliseconds timeout) override { nccl_->setTimeout(timeout); }
  void abort() override;
  void shutdown() override;

 private:
  // A Work that raises the group's error; null if NCCL makes none.
  WorkPtr wrapped(WorkPtr work) const;
  template <class F>
  WorkPtr start(F&& call) {
    lookOften();
    return wrapped(failed_.explain(call));
  }
  void watch();
  void lookOften();
  void stopWatching();
  void abortOnce();

  const BackendPtr nccl_;
  const FailedGroup failed_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::chrono::milliseconds pause_;  // after the present one
  std::once_flag aborted_;
  std::thread watching_;
};

}  // namespace ringreduce
