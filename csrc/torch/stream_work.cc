// Ordering callers' streams behind an operation, and telling of its group's error.
#include "torch/stream_work.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <string>
#include <thread>

#include "base/clock.h"
#include "base/error.h"
#include "torch/errors.h"

namespace ringreduce {

StreamWork::StreamWork(int rank, uint64_t sequence, const Job& job,
                       const std::shared_ptr<cuda::GpuCommunicator>& communicator,
                       const c10::Stream& stream)
    : c10d::Work(rank, job.type, job.title, job.inputs),
      outputs_(job.outputs),
      sequence_(sequence),
      future_of_one_(job.future_of_one),
      observer_(job.observer),
      communicator_(communicator),
      stream_(stream),
      timed_(observer_->timing),
      begin_(stream.device_type(),
             timed_ ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT),
      end_(stream.device_type(), begin_.flag()),
      future_(c10::make_intrusive<c10::ivalue::Future>(futureType(job.future_of_one),
                                                       std::vector<c10::Device>{stream.device()})) {
  if (timed_) begin_.record(stream_);
}

void StreamWork::enqueued() {
  end_.record(stream_);
  finish();
  {
    // A Future takes the end of the current streams for the time at which its value is there.
    const c10::StreamGuard on(stream_);
    if (future_of_one_)
      future_->markCompleted(outputs_.at(0));
    else
      future_->markCompleted(c10::IValue(outputs_));
  }
}

void StreamWork::tell() const {
  if (observer_->hooked) tellObserver(*observer_, opType_, sequence_, started_, now(), rank_);
}

void StreamWork::failed(std::exception_ptr error) {
  finish(error);
  future_->setError(std::move(error));
}

void StreamWork::raise() const {
  if (const auto communicator = communicator_.lock()) translated([&] { communicator->check(); });
}

bool StreamWork::isCompleted() {
  return exception() != nullptr || end_.query();
}

bool StreamWork::isSuccess() const {
  return exception() == nullptr && end_.query();
}

std::exception_ptr StreamWork::exception() const {
  try {
    raise();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

// With a timeout it does wait on the host, as NCCL's does.
bool StreamWork::wait(std::chrono::milliseconds timeout) {
  synchronize();
  if (timeout.count() <= 0 || timeout.count() >= kNever / kMillisecond) return true;
  for (const Nanos end = now() + timeout.count() * kMillisecond; !end_.query();) {
    raise();
    if (now() > end)
      translated([&] {
        throw Error(Failure::kTimeout, "operation #" + std::to_string(sequence_) + " on " +
                                           stream_.device().str() + " was not done within the " +
                                           std::to_string(timeout.count()) +
                                           " ms that Work.wait was given; it goes on");
      });
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  raise();
  return true;
}

void StreamWork::synchronize() {
  raise();
  end_.block(c10::impl::VirtualGuardImpl(stream_.device_type()).getStream(stream_.device()));
}

void StreamWork::abort() {
  TORCH_CHECK(false, "an operation cannot be aborted alone; abort its group");
}

c10::intrusive_ptr<c10::ivalue::Future> StreamWork::getFutureResult() {
  auto result = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
  const auto code = exception() ? c10d::WorkResult::COMM_ERROR : c10d::WorkResult::SUCCESS;
  result->markCompleted(c10::IValue(static_cast<int64_t>(code)));
  return result;
}

float StreamWork::getDuration() const {
  TORCH_CHECK(timed_, "call _enable_collectives_timing() on the group before the operation");
  TORCH_CHECK(end_.query(), "the operation is not over yet");
  return static_cast<float>(begin_.elapsedTime(end_));
}

}  // namespace ringreduce
