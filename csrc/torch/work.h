// torch's handle on an operation: c10d::Work over an OperationHandle of the core.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "group/group.h"
#include "torch/held_memory.h"

namespace ringreduce {

// Makes the context that follows an error's text; called only on an error.  May be null.
using Context = std::function<std::string()>;

// torch's completion hooks, by which its flight recorder learns that an operation has succeeded.
class CompletionHooks {
 public:
  // `key` names the Work (Work::getCompletionKey); `milliseconds` is null if nothing is timed.
  using Hook = std::function<void(uint64_t key, std::optional<float> milliseconds)>;

  bool any() const { return any_; }
  void add(int64_t id, Hook hook);
  void remove(int64_t id);
  // Without a lock: the end of a hook's call may be the end of its owner, which then removes it.
  void call(uint64_t key, std::optional<float> milliseconds);

 private:
  std::atomic<bool> any_{false};
  std::mutex mutex_;  // of the hooks
  std::map<int64_t, Hook> hooks_;
};

// A backend's observation of all its operations: their number, timing and torch's hooks.
class Observer {
 public:
  std::atomic<uint64_t> calls{0};  // torch's sequence number: the first call has number 1
  std::atomic<bool> timing{false};
  std::atomic<bool> hooked{false};  // on_completion is set
  std::function<void(std::shared_ptr<c10d::WorkInfo>)> on_completion;
  CompletionHooks completion_hooks;

  bool watches() const { return hooked || completion_hooks.any(); }

  // Notes that the calling thread starts an operation.
  void noteThread() {
    const auto self = std::this_thread::get_id();
    auto first = first_thread_.load(std::memory_order_relaxed);
    if (first == self) return;
    if (first != std::thread::id() || !first_thread_.compare_exchange_strong(first, self))
      several_threads_ = true;
  }
  bool severalThreads() const { return several_threads_; }

  // Hooks to call before the group is aborted or when its failure is first known.
  void setAbortHook(int64_t id, std::function<void()> hook);  // null: removes it
  // Sets the group's flag and calls the hooks, once a group, not for one that was left.  An
  // exception from a hook is logged and dropped.
  void noteFailure(uint64_t group);
  // The group's flag for optimizers on the CPU: 0, and 1 once its failure was noted.
  at::Tensor foundInf();

  // The backend's groups so far: a reconfigure makes another one.
  uint64_t groups() const { return groups_; }
  void enterGroup();

 private:
  std::atomic<std::thread::id> first_thread_{};
  std::atomic<bool> several_threads_{false};
  std::mutex mutex_;  // of the next four
  std::map<int64_t, std::function<void()>> abort_hooks_;
  bool aborted_ = false;
  at::Tensor found_inf_;  // undefined until the flag is asked for
  std::atomic<uint64_t> groups_{0};
};

void tellObserver(const Observer& observer, c10d::OpType type, uint64_t sequence, Nanos started,
                  Nanos ended, int rank);

// The type of a Future's value: a tensor, or a list of them.
const c10::TypePtr& futureType(bool of_one);

// The operations of one call of torch, and the data of its Work.
struct Job {
  c10d::OpType type;
  const char* title;                       // for the profiler: "ringreduce:all_reduce"
  std::vector<at::Tensor> inputs = {};     // for the profiler
  std::vector<at::Tensor> outputs = {};    // the Future's value
  std::vector<Operation> operations = {};  // one after the other; not for messages
  Context context = {};                    // follows an error's text: the DDP bucket
  bool future_of_one = false;  // the Future's value is the tensor itself (hooks), not a list
  std::shared_ptr<Observer> observer = {};
  uint64_t sequence = 0;                  // as torch counts; 0: the next one
  std::vector<at::Tensor> others = {};    // that the operations use too
  std::shared_ptr<HeldMemory> held = {};  // if the caller goes on meanwhile
  bool refused_after_failure = false;     // where the group has failed, also if it is asynchronous
};

// Removes a work that has succeeded from torch's registry, as torch's own backends do.  One that
// has failed stays there: wait_tensor then raises its error.
void unregister(c10d::Work* work);

class Work final : public c10d::Work {
 public:
  using Pointer = c10::intrusive_ptr<Work>;

  // Collectives.  Blocking: the operations have run when this returns, in this thread if they
  // could.  Throws their error.  Else they are queued.
  static Pointer start(Group& group, Job job, bool blocking);
  // Blocking collectives, without a Work if they can run at once in this thread.
  static void run(Group& group, Job job);
  // A send or a receive, which may be over already.
  static Pointer start(Group& group, Job job, Message message);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override;
  void abort() override;
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  uint64_t getSequencenumber() const override { return sequence_; }
  int sourceRank() const override;     // of a receive that is done
  float getDuration() const override;  // in ms, from its start to its end
  // Overrides a method that torch has since 2.15.  No two Works of a process have the same key.
  uint64_t getCompletionKey() const { return completion_key_; }

  Work(Group& group, const Job& job);

 private:
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
  Pointer self() { return Pointer::reclaim_copy(this); }
  // `ended`: in CLOCK_MONOTONIC; 0: now.
  void complete(std::exception_ptr error, Nanos ended = 0);
  void releaseMemory() {
    if (held_) held_->release();
  }
  std::exception_ptr shown(std::exception_ptr error) const;
  void tellOfFailure() const;
  bool hasCompletedFuture();
  void settle(c10::ivalue::Future& future) const;

  const std::weak_ptr<Group> group_;
  const std::vector<at::Tensor> outputs_;
  const Context context_;
  const uint64_t operation_;  // as errors number it
  const uint64_t sequence_;   // as torch does
  const uint64_t completion_key_;
  const bool future_of_one_;
  const std::shared_ptr<Observer> observer_;
  const uint64_t observed_group_;
  const bool timed_;
  const Nanos started_ = monotonicNow();
  std::atomic<Nanos> ended_{0};

  std::shared_ptr<HeldMemory> held_;
  // Null: it ran in the caller's thread and is over.
  std::shared_ptr<OperationHandle> handle_;
  std::shared_ptr<Delivery> delivery_;  // the same, for messages

  std::atomic<bool> claimed_{false};  // a thread completes it
  std::mutex outcome_mutex_;          // guards the next three
  bool known_ = false;                // how it ended
  std::exception_ptr outcome_;
  FuturePtr future_;  // made when it is first asked for
  std::atomic<bool> settled_{false};
};

// The average of a DDP bucket: the operation, and the bucket's tensor once it is averaged.
struct BucketAverage {
  c10::intrusive_ptr<c10d::Work> work;
  c10::intrusive_ptr<c10::ivalue::Future> future;
};

// Several works that are waited for as one (startCoalescing ... endCoalescing).
class WorkList final : public c10d::Work {
 public:
  WorkList(int rank, std::vector<c10::intrusive_ptr<c10d::Work>> works)
      : c10d::Work(rank, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override {
    return std::ranges::all_of(works_, [](const auto& work) { return work->isCompleted(); });
  }
  bool isSuccess() const override {
    return std::ranges::all_of(works_, [](const auto& work) { return work->isSuccess(); });
  }
  std::exception_ptr exception() const override {
    for (const auto& work : works_)
      if (std::exception_ptr error = work->exception()) return error;
    return nullptr;
  }
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override;
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  const std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace ringreduce
