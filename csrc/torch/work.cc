// Starting, waiting for and completing operations.
#include "torch/work.h"

#include <utility>

#include "torch/errors.h"

namespace ringreduce {
namespace {

c10::TypePtr futureType(bool of_one) {
  return of_one ? c10::TypePtr(c10::TensorType::get())
                : c10::TypePtr(c10::ListType::create(c10::TensorType::get()));
}

}  // namespace

Work::Work(int rank, const Job& job, uint64_t sequence)
    : c10d::Work(rank, job.type, job.title, job.inputs),
      outputs_(job.outputs),
      context_(job.context),
      sequence_(sequence),
      future_of_one_(job.future_of_one),
      future_(c10::make_intrusive<c10::ivalue::Future>(futureType(job.future_of_one))) {}

c10::intrusive_ptr<Work> Work::start(Group& group, Job job, bool blocking) {
  auto work = c10::make_intrusive<Work>(group.rank(), job, group.operations());
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
    rethrowToPython(job.context);
  }
  if (blocking) work->wait(kNoTimeout);
  return work;
}

// Called in the caller's thread or in the group's thread for completions, never in the worker: what
// hangs on the Future may itself wait for operations of this group.
void Work::complete(std::exception_ptr error) {
  error = toPython(std::move(error), context_);
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
  return ticket_ ? toPython(ticket_->error(), context_) : nullptr;
}

bool Work::wait(std::chrono::milliseconds timeout) {
  if (!ticket_) return true;
  const Nanos longest = timeout.count() > 0 ? timeout.count() * kMillisecond : kNever;
  if (!ticket_->wait(longest, &checkSignals)) {
    try {
      throw Error(Failure::kTimeout,
                  "operation #" + std::to_string(sequence_) + " was not done within the " +
                      std::to_string(timeout.count()) + " ms that Work.wait was given; it goes on");
    } catch (...) {
      rethrowToPython(context_);
    }
  }
  if (const auto error = ticket_->error()) std::rethrow_exception(toPython(error, context_));
  return true;
}

void Work::abort() {
  TORCH_CHECK(false, "an operation cannot be aborted alone; abort its group");
}

}  // namespace ringreduce
