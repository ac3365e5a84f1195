// Starting, waiting for and completing operations.
#include "torch/work.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "torch/arguments.h"
#include "torch/errors.h"

namespace ringreduce {
namespace {

std::string textOf(const Context& context) {
  return context ? context() : "";
}

// On the clock that this torch keeps works' times by.
using TorchClock = decltype(c10d::WorkInfo::timeStarted)::clock;
TorchClock::time_point timePoint(Nanos time) {
  return TorchClock::now() + std::chrono::duration_cast<TorchClock::duration>(
                                 std::chrono::nanoseconds(time - monotonicNow()));
}

}  // namespace

const c10::TypePtr& futureType(bool of_one) {
  static const auto* one = new c10::TypePtr(c10::TensorType::get());
  static const auto* list = new c10::TypePtr(c10::ListType::create(c10::TensorType::get()));
  return of_one ? *one : *list;
}

// The operation is over, so an exception from the hook is logged and dropped.
void tellObserver(const Observer& observer, c10d::OpType type, uint64_t sequence, Nanos started,
                  Nanos ended, int rank) {
  try {
    observer.on_completion(std::make_shared<c10d::WorkInfo>(
        type, sequence, timePoint(started), timePoint(ended),
        std::chrono::duration<float>(static_cast<float>(ended - started) / kSecond)));
  } catch (const std::exception& error) {
    log("the onCompletion hook of rank " + std::to_string(rank) +
        "'s group raised an error: " + error.what());
  }
}

void CompletionHooks::add(int64_t id, Hook hook) {
  const std::lock_guard lock(mutex_);
  hooks_[id] = std::move(hook);
  any_ = true;
}

void CompletionHooks::remove(int64_t id) {
  const std::lock_guard lock(mutex_);
  hooks_.erase(id);
  any_ = !hooks_.empty();
}

void CompletionHooks::call(uint64_t key, std::optional<float> milliseconds) {
  const auto hooks = [&] {
    const std::lock_guard lock(mutex_);
    return hooks_;
  }();
  for (const auto& [id, hook] : hooks) {
    try {
      hook(key, milliseconds);
    } catch (const std::exception& error) {
      log("completion hook " + std::to_string(id) + " raised an error: " + error.what());
    }
  }
}

namespace {

uint64_t nextCompletionKey() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

}  // namespace

void unregister(c10d::Work* work) {
  if (c10d::allow_inflight_collective_as_graph_input())
    c10d::unregister_work(c10::intrusive_ptr<c10d::Work>::reclaim_copy(work));
}

void Observer::setAbortHook(int64_t id, std::function<void()> hook) {
  const std::lock_guard lock(mutex_);
  if (hook)
    abort_hooks_[id] = std::move(hook);
  else
    abort_hooks_.erase(id);
}

void Observer::noteFailure(uint64_t group) {
  decltype(abort_hooks_) hooks;
  {
    const std::lock_guard lock(mutex_);
    if (group != groups_ || std::exchange(aborted_, true)) return;
    if (found_inf_.defined())
      std::atomic_ref(*found_inf_.mutable_data_ptr<float>()).store(1, std::memory_order_release);
    hooks = abort_hooks_;
  }
  for (const auto& [id, hook] : hooks) {
    try {
      hook();
    } catch (const std::exception& error) {
      log("abort hook " + std::to_string(id) + " raised an error: " + error.what());
    }
  }
}

at::Tensor Observer::foundInf() {
  const std::lock_guard lock(mutex_);
  if (!found_inf_.defined())
    found_inf_ = at::full({}, aborted_ ? 1.0 : 0.0, at::TensorOptions(at::kFloat).device(at::kCPU));
  return found_inf_;
}

void Observer::enterGroup() {
  const std::lock_guard lock(mutex_);
  ++groups_;
  // Else it is the same group with other ranks, and optimizers have its flag.
  if (std::exchange(aborted_, false)) found_inf_ = at::Tensor();
  calls = 0;
}

Work::Work(Group& group, const Job& job)
    // c10d::Work makes a profiler's record if it has a title, even if no profiler runs.
    : c10d::Work(group.rank(), job.type, at::hasCallbacks() ? job.title : nullptr, job.inputs),
      group_(group.weak_from_this()),
      outputs_(job.outputs),
      context_(job.context),
      operation_(group.operations()),
      sequence_(job.sequence ? job.sequence : ++job.observer->calls),
      completion_key_(nextCompletionKey()),
      future_of_one_(job.future_of_one),
      observer_(job.observer),
      observed_group_(observer_->groups()),
      timed_(observer_->timing),
      held_(job.held) {
  observer_->noteThread();
}

std::exception_ptr Work::shown(std::exception_ptr error) const {
  return toPython(std::move(error), textOf(context_), observer_->severalThreads());
}

Work::Pointer Work::start(Group& group, Job job, bool blocking) {
  const auto alive = group.shared_from_this();  // a signal handler may destroy the group meanwhile
  auto work = c10::make_intrusive<Work>(group, job);
  try {
    Nanos ended = 0;
    if (blocking && group.tryRunHere(job.operations, &ended)) {
      work->complete(nullptr, ended);
      return work;
    }
    if (job.refused_after_failure) group.checkHealth();
    work->handle_ = group.submitAll(std::move(job.operations), [work](std::exception_ptr error) {
      work->complete(std::move(error));
    });
  } catch (...) {
    work->finish(std::current_exception());
    work->tellOfFailure();
    rethrowToPython(textOf(job.context), job.observer->severalThreads());
  }
  if (blocking) work->wait(kNoTimeout);
  return work;
}

void Work::run(Group& group, Job job) {
  const auto alive = group.shared_from_this();
  Observer& observer = *job.observer;
  const uint64_t observed_group = observer.groups();
  observer.noteThread();
  job.sequence = ++observer.calls;
  try {
    if (group.tryRunHere(job.operations)) return;
  } catch (...) {
    if (group.failed()) observer.noteFailure(observed_group);
    rethrowToPython("", observer.severalThreads());
  }
  start(group, std::move(job), /*blocking=*/true);
}

Work::Pointer Work::start(Group& group, Job job, Message message) {
  const auto alive = group.shared_from_this();
  auto work = c10::make_intrusive<Work>(group, job);
  try {
    work->delivery_ = group.post(std::move(message));
    // A small message is over by now, as a rule.
    if (!work->delivery_->isDone()) {
      work->held_ = std::make_shared<HeldMemory>(
          std::initializer_list<const std::vector<at::Tensor>*>{&job.inputs});
      group.keep(*work->delivery_, work->held_);
    }
  } catch (...) {
    work->finish(std::current_exception());
    work->tellOfFailure();
    rethrowToPython("", job.observer->severalThreads());
  }
  work->handle_ = work->delivery_;
  // A profiler or a hook is notified without a wait; otherwise that would cost more than a small
  // message.
  const bool watched = work->recordFunctionEndCallback_ || work->observer_->watches();
  const bool told_later = watched && work->delivery_->setCompletion([work](std::exception_ptr e) {
    work->complete(std::move(e));
  });
  if (!told_later && work->delivery_->isDone()) work->complete(work->delivery_->error());
  return work;
}

// Settles the profiler's record and the Future.  Called first by a thread that has waited or by the
// group's thread for completions, never by the worker: callbacks of the Future may themselves wait
// for operations of this group.
void Work::complete(std::exception_ptr error, Nanos ended) {
  releaseMemory();
  if (claimed_.exchange(true)) {
    // Another thread completes it.  The Future's callbacks, which that thread runs, may get here.
    while (!settled_ && !hasCompletedFuture()) std::this_thread::yield();
    return;
  }
  if (error) {
    tellOfFailure();
    error = shown(std::move(error));
  }
  ended_.store(ended > 0 ? ended : monotonicNow(), std::memory_order_relaxed);
  finish(error);
  if (!error && observer_->completion_hooks.any())
    observer_->completion_hooks.call(completion_key_,
                                     timed_ ? std::optional(getDuration()) : std::nullopt);
  FuturePtr future;
  {
    const std::lock_guard lock(outcome_mutex_);
    known_ = true;
    outcome_ = error;
    future = future_;
  }
  if (future) settle(*future);
  settled_ = true;
  if (!error) unregister(this);
  if (observer_->hooked)
    tellObserver(*observer_, retrieveOpType(), sequence_, started_, ended_, rank_);
}

void Work::tellOfFailure() const {
  if (const auto group = group_.lock(); group && group->failed())
    observer_->noteFailure(observed_group_);
}

bool Work::hasCompletedFuture() {
  const std::lock_guard lock(outcome_mutex_);
  return future_ && future_->completed();
}

void Work::settle(c10::ivalue::Future& future) const {
  if (outcome_)
    future.setError(outcome_);
  else if (future_of_one_)
    future.markCompleted(outputs_.at(0));
  else
    future.markCompleted(c10::IValue(outputs_));
}

c10::intrusive_ptr<c10::ivalue::Future> Work::getFuture() {
  FuturePtr future;
  {
    const std::lock_guard lock(outcome_mutex_);
    if (future_) return future_;
    future = future_ = c10::make_intrusive<c10::ivalue::Future>(futureType(future_of_one_));
    if (known_) settle(*future);  // nothing hangs on it yet
    if (known_) return future;
  }
  // The Future will be waited for, somewhere in torch.
  if (const auto group = group_.lock(); group && delivery_)
    group->expect(*delivery_);
  else if (group)
    group->hurry();
  if (delivery_ && !delivery_->setCompletion(
                       [work = self()](std::exception_ptr e) { work->complete(std::move(e)); }))
    complete(delivery_->error());
  return future;
}

c10::intrusive_ptr<c10::ivalue::Future> Work::getFutureResult() {
  auto result = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
  getFuture()->addCallback([result, work = self()](c10::ivalue::Future&) {
    auto code = c10d::WorkResult::SUCCESS;
    if (const std::exception_ptr error = work->handle_ ? work->handle_->error() : nullptr) {
      code = c10d::WorkResult::UNKNOWN;
      try {
        std::rethrow_exception(error);
      } catch (const Error& e) {
        code = e.kind() == Failure::kTimeout ? c10d::WorkResult::TIMEOUT
                                             : c10d::WorkResult::COMM_ERROR;
      } catch (...) {  // not the core's: UNKNOWN
      }
    }
    result->markCompleted(c10::IValue(static_cast<int64_t>(code)));
  });
  return result;
}

bool Work::isCompleted() {
  if (handle_ && !handle_->isDone()) return false;
  if (handle_ && handle_->error()) tellOfFailure();  // its completion may come later
  releaseMemory();
  return true;
}

bool Work::isSuccess() const {
  return !handle_ || (handle_->isDone() && !handle_->error());
}

std::exception_ptr Work::exception() const {
  const std::exception_ptr error = handle_ ? handle_->error() : nullptr;
  return error ? shown(error) : nullptr;
}

// A finished CPU operation needs nothing more.
void Work::synchronize() {
  if (isSuccess()) unregister(this);
}

bool Work::wait(std::chrono::milliseconds timeout) {
  if (!handle_) {
    unregister(this);  // torch registers a work after it may have completed
    return true;
  }
  translated([&] {
    const Nanos limit = timeoutOf(timeout), longest = limit > 0 ? limit : kNever;
    const std::shared_ptr<Group> group = group_.lock();
    // A group that is gone has run all its operations, or failed them.
    const bool done = !group      ? handle_->wait(longest, nullptr)
                      : delivery_ ? group->await(*delivery_, longest)
                                  : group->await(*handle_, longest);
    if (!done)
      throw Error(Failure::kTimeout,
                  "operation #" + std::to_string(operation_) +
                      " was not done within the timeout of " + std::to_string(timeout.count()) +
                      " ms that Work.wait was given; it goes on",
                  {.group = group ? group->options().name : "", .is_final = false});
  });
  const std::exception_ptr error = handle_->error();
  complete(error);
  if (error) std::rethrow_exception(shown(error));
  unregister(this);
  return true;
}

void Work::abort() {
  TORCH_CHECK(false, "an operation cannot be aborted alone; abort its group");
}

int Work::sourceRank() const {
  const bool receive = delivery_ && delivery_->message.direction == Message::Direction::kReceive;
  TORCH_CHECK(receive && delivery_->isDone(),
              "only a receive that is over has a source rank to tell");
  return delivery_->sender();
}

float Work::getDuration() const {
  TORCH_CHECK(timed_, "call _enable_collectives_timing() on the group before the operation");
  const Nanos ended = ended_;
  TORCH_CHECK(ended != 0, "the operation is not over yet");
  return static_cast<float>(ended - started_) / kMillisecond;
}

// ---- WorkList

// All are waited for, and then the first error is thrown: buffers are quiet afterwards.
bool WorkList::wait(std::chrono::milliseconds timeout) {
  std::exception_ptr first;
  for (const auto& work : works_) {
    try {
      work->wait(timeout);
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
  unregister(this);
  return true;
}

void WorkList::synchronize() {
  for (const auto& work : works_) work->synchronize();
  unregister(this);
}

std::vector<at::Tensor> WorkList::result() {
  std::vector<at::Tensor> all;
  for (const auto& work : works_) {
    const std::vector<at::Tensor> some = work->result();
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

c10::intrusive_ptr<c10::ivalue::Future> WorkList::getFuture() {
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
      c10::FutureType::create(futureType(false)));
  std::vector<c10::Device> devices;
  for (const auto& work : works_) {
    const auto future = work->getFuture();
    TORCH_CHECK(future, "NCCL has no Future of calls that were put together; use wait()");
    futures.push_back(future);
    devices.insert(devices.end(), future->devices().begin(), future->devices().end());
  }
  // collectAll's own Future knows no devices.  This one does: a wait for it is ordered behind the
  // work in the streams of all of them, as is the stream in which it is completed.
  auto result = c10::make_intrusive<c10::ivalue::Future>(futureType(false), std::move(devices));
  c10::collectAll(futures)->addCallback([result, futures, tensors = this->result()](auto& all) {
    if (all.hasError()) return result->setError(all.exception_ptr());
    for (const auto& future : futures.vec()) future->wait();  // they are done: orders streams
    result->markCompleted(c10::IValue(tensors));
  });
  return result;
}

}  // namespace ringreduce
