// Starting, waiting for and completing operations.
#include "torch/work.h"

#include <thread>
#include <utility>

#include "torch/errors.h"

namespace ringreduce {
namespace {

c10::TypePtr futureType(bool of_one) {
  return of_one ? c10::TypePtr(c10::TensorType::get())
                : c10::TypePtr(c10::ListType::create(c10::TensorType::get()));
}

std::string textOf(const Context& context) {
  return context ? context() : "";
}

}  // namespace

Work::Work(Group& group, const Job& job)
    : c10d::Work(group.rank(), job.type, job.title, job.inputs),
      group_(group.weak_from_this()),
      outputs_(job.outputs),
      context_(job.context),
      sequence_(group.operations()),
      future_of_one_(job.future_of_one),
      future_(c10::make_intrusive<c10::ivalue::Future>(futureType(job.future_of_one))) {}

c10::intrusive_ptr<Work> Work::start(Group& group, Job job, bool blocking) {
  const auto alive = group.shared_from_this();  // whatever a signal handler destroys meanwhile
  auto work = c10::make_intrusive<Work>(group, job);
  try {
    if (blocking && group.tryRunHere(job.operation)) {
      work->complete(nullptr);
      return work;
    }
    work->ticket_ = group.submit(std::move(job.operation), [work](std::exception_ptr error) {
      work->complete(std::move(error));
    });
  } catch (...) {
    work->finish(std::current_exception());
    rethrowToPython(textOf(job.context));
  }
  if (blocking) work->wait(kNoTimeout);
  return work;
}

// Completes the Future and the profiler's record.  Called by whoever is first, a thread that has
// waited or the group's thread for completions, and never by the worker: what hangs on the Future
// may itself wait for operations of this group.
void Work::complete(std::exception_ptr error) {
  if (completed_once_.exchange(true)) {
    while (!future_->completed()) std::this_thread::yield();  // the other is about to
    return;
  }
  if (error) error = toPython(std::move(error), textOf(context_));
  if (error)
    future_->setError(error);
  else if (future_of_one_)
    future_->markCompleted(outputs_.at(0));
  else
    future_->markCompleted(c10::IValue(outputs_));
  finish(std::move(error));
}

bool Work::isCompleted() {
  return !ticket_ || ticket_->isDone();
}

bool Work::isSuccess() const {
  return !ticket_ || (ticket_->isDone() && !ticket_->error());
}

std::exception_ptr Work::exception() const {
  const std::exception_ptr error = ticket_ ? ticket_->error() : nullptr;
  return error ? toPython(error, textOf(context_)) : nullptr;
}

bool Work::wait(std::chrono::milliseconds timeout) {
  if (!ticket_) return true;
  const bool limited = timeout.count() > 0 && timeout.count() < kNever / kMillisecond;
  const Nanos longest = limited ? timeout.count() * kMillisecond : kNever;
  translated([&] {
    const std::shared_ptr<Group> group = group_.lock();
    // A group that is gone has run all its operations, or failed them.
    if (!(group ? group->await(*ticket_, longest) : ticket_->isDone()))
      throw Error(Failure::kTimeout,
                  "operation #" + std::to_string(sequence_) + " was not done within the " +
                      std::to_string(timeout.count()) + " ms that Work.wait was given; it goes on");
  });
  const std::exception_ptr error = ticket_->error();
  complete(error);
  if (error) std::rethrow_exception(toPython(error, textOf(context_)));
  return true;
}

void Work::abort() {
  TORCH_CHECK(false, "an operation cannot be aborted alone; abort its group");
}

}  // namespace ringreduce
