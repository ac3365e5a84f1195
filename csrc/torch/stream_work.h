// torch's handle on an operation that was put into a stream: the contract of ProcessGroupNCCL.
//
// Nothing waits on the host, unless `wait` is given a timeout: it lets the caller's current stream
// wait, and the Future is complete once the operation is in its stream; work that uses its value
// is ordered behind it.  So an operation that fails later is not this Work's error but the group's,
// which `wait`, `exception` and the next call raise as soon as it is known.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>

#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "cuda/communicator/gpu_communicator.h"
#include "torch/work.h"

namespace ringreduce {

class StreamWork final : public c10d::Work {
 public:
  // Ignores the job's operations: the caller puts them into the stream and then calls `enqueued`.
  // The communicator appends its calls' labels to errors.
  StreamWork(int rank, uint64_t sequence, const Job& job,
             const std::shared_ptr<cuda::GpuCommunicator>& communicator, const c10::Stream& stream);

  // All of it is in the stream.
  void enqueued();
  // Tells the observer; with no lock held.
  void tell() const;
  // It could not be put there.
  void failed(std::exception_ptr error);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override;
  void abort() override;
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  uint64_t getSequencenumber() const override { return sequence_; }
  float getDuration() const override;  // in ms, of its stream's time, once it is over

 private:
  void raise() const;  // the group's error, if there is one

  const std::vector<at::Tensor> outputs_;
  const uint64_t sequence_;
  const bool future_of_one_;
  const std::shared_ptr<Observer> observer_;
  const Nanos started_ = now();
  // Not kept alive: a communicator that is gone has run what was put into its streams, or failed
  // it.
  const std::weak_ptr<cuda::GpuCommunicator> communicator_;
  const c10::Stream stream_;
  const bool timed_;
  c10::Event begin_, end_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace ringreduce
