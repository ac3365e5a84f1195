// Copies in the host's memory, and the Work that brings results back from them.
#include "torch/staged_backend.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <mutex>
#include <optional>
#include <utility>

#include "base/error.h"
#include "torch/arguments.h"
#include "torch/errors.h"
#include "torch/work.h"

namespace ringreduce {

// A call's tensors in the host's memory, and which of them are its results.
class StagedBackend::Copies {
 public:
  explicit Copies(const char* call) : call_(call) {}

  at::Tensor read(const at::Tensor& tensor) {
    if (!known(tensor)) return tensor;
    const at::NoGradGuard no_grad;
    if (!isDense(tensor)) return tensor.detach().to(at::kCPU);
    return like(tensor).copy_(tensor.detach());
  }
  at::Tensor write(const at::Tensor& tensor) {
    return known(tensor) ? result(tensor, like(tensor)) : tensor;
  }
  at::Tensor both(const at::Tensor& tensor) {
    return known(tensor) ? result(tensor, read(tensor)) : tensor;
  }
  Tensors read(const Tensors& list) {
    Tensors all;
    for (const at::Tensor& tensor : list) all.push_back(read(tensor));
    return all;
  }
  Tensors write(const Tensors& list) {
    Tensors all;
    for (const at::Tensor& tensor : list) all.push_back(write(tensor));
    return all;
  }
  Tensors both(const Tensors& list) {
    Tensors all;
    for (const at::Tensor& tensor : list) all.push_back(both(tensor));
    return all;
  }

  c10::Device device() const { return device_.value_or(at::kCPU); }
  const Tensors& results() const { return results_; }
  void giveBack() const {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < results_.size(); ++i)
      if (isDense(results_[i]))
        results_[i].detach().copy_(copies_[i], /*non_blocking=*/true);
      else
        at::Tensor(results_[i]).copy_(copies_[i]);  // detached, it would get elements of its own
  }

 private:
  static bool isDense(const at::Tensor& tensor) { return tensor.layout() == at::kStrided; }

  // What the CPU backend refuses anyway is left to it, but for what would look right once copied.
  bool known(const at::Tensor& tensor) {
    if (!tensor.defined()) return false;
    if (device_ && *device_ != tensor.device())
      refuse(call_, "takes tensors on one device, not on " + device_->str() + " and on " +
                        tensor.device().str());
    device_ = tensor.device();
    return true;
  }
  at::Tensor result(const at::Tensor& tensor, at::Tensor copy) {
    if (isDense(tensor) && at::has_internal_overlap(tensor) == at::MemOverlap::Yes)
      refuse(call_,
             "cannot write to a tensor whose elements share memory (an expanded one); pass "
             ".contiguous()");
    results_.push_back(tensor);
    copies_.push_back(copy);
    return copy;
  }
  // Pinned, so that the way back needs no wait.
  static at::Tensor like(const at::Tensor& tensor) {
    return at::empty(tensor.sizes(), at::TensorOptions()
                                         .dtype(tensor.scalar_type())
                                         .device(at::kCPU)
                                         .pinned_memory(tensor.is_cuda()));
  }

  const char* call_;
  std::optional<c10::Device> device_;
  Tensors results_, copies_;  // in pairs
};

namespace {

// Results come back once the CPU's Work is over, in the stream of the first caller that asks.
template <class Copies>
class StagedWork final : public c10d::Work {
 public:
  StagedWork(int rank, c10d::OpType type, c10::intrusive_ptr<c10d::Work> inner, Copies copies)
      : c10d::Work(rank, type),
        inner_(std::move(inner)),
        copies_(std::move(copies)),
        has_streams_(!copies_.device().is_cpu()) {
    if (has_streams_) called_.emplace(copies_.device().type()).record(current());
  }

  bool isCompleted() override {
    if (!inner_->isCompleted()) return false;
    if (!inner_->isSuccess()) return true;
    deliver();
    return !has_streams_ || delivered_->query();
  }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  bool wait(std::chrono::milliseconds timeout) override {
    inner_->wait(timeout);
    deliver();
    if (has_streams_) delivered_->block(current());
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  void abort() override { inner_->abort(); }
  std::vector<at::Tensor> result() override { return copies_.results(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }
  float getDuration() const override { return inner_->getDuration(); }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    {
      const std::lock_guard lock(future_mutex_);
      if (future_) return future_;
      future_ = c10::make_intrusive<c10::ivalue::Future>(
          futureType(false),
          has_streams_ ? std::vector<c10::Device>{copies_.device()} : std::vector<c10::Device>{});
    }
    const auto self = c10::intrusive_ptr<StagedWork>::reclaim_copy(this);
    inner_->getFuture()->addCallback([self](c10::ivalue::Future& done) {
      if (done.hasError()) return self->future_->setError(done.exception_ptr());
      try {
        self->deliver();
        if (self->has_streams_) self->delivered_->block(self->current());
      } catch (...) {
        return self->future_->setError(std::current_exception());
      }
      self->future_->markCompleted(c10::IValue(self->copies_.results()));
    });
    return future_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override {
    return inner_->getFutureResult();
  }

 private:
  c10::impl::VirtualGuardImpl guard() const {
    return c10::impl::VirtualGuardImpl(copies_.device().type());
  }
  c10::Stream current() const { return guard().getStream(copies_.device()); }

  void deliver() {
    const std::lock_guard lock(deliver_mutex_);
    if (std::exchange(is_delivered_, true)) return;
    if (!has_streams_) return copies_.giveBack();
    const c10::DeviceGuard on(copies_.device());
    const c10::Stream stream = current();
    called_->block(stream);  // what the caller had put into its stream may use the results' memory
    copies_.giveBack();
    for (const at::Tensor& tensor : copies_.results())
      if (tensor.has_storage()) guard().recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
    delivered_.emplace(copies_.device().type()).record(stream);
  }

  const c10::intrusive_ptr<c10d::Work> inner_;
  const Copies copies_;
  const bool has_streams_;  // the CPU has none
  std::mutex deliver_mutex_, future_mutex_;
  bool is_delivered_ = false;
  std::optional<c10::Event> called_, delivered_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace

template <class Call>
StagedBackend::WorkPtr StagedBackend::run(c10d::OpType type, const Copies& copies, Call&& call) {
  WorkPtr work = c10::make_intrusive<StagedWork<Copies>>(rank_, type, call(), copies);
  const std::lock_guard lock(mutex_);
  if (coalescing_) works_.push_back(work);
  return work;
}

void StagedBackend::startCoalescing() {
  const std::lock_guard lock(mutex_);
  coalescing_ = true;
  works_.clear();
}

StagedBackend::WorkPtr StagedBackend::endCoalescing() {
  const std::lock_guard lock(mutex_);
  coalescing_ = false;
  return c10::make_intrusive<WorkList>(rank_, std::exchange(works_, {}));
}

StagedBackend::WorkPtr StagedBackend::allreduce(Tensors& tensors,
                                                const c10d::AllreduceOptions& options) {
  return translated([&] {
    Copies copies("all_reduce");
    Tensors host = copies.both(tensors);
    return run(c10d::OpType::ALLREDUCE, copies, [&] { return cpu_.allreduce(host, options); });
  });
}

StagedBackend::WorkPtr StagedBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return translated([&] {
    Copies copies("all_reduce_coalesced");
    Tensors host = copies.both(tensors);
    return run(c10d::OpType::ALLREDUCE_COALESCED, copies,
               [&] { return cpu_.allreduce_coalesced(host, options); });
  });
}

StagedBackend::WorkPtr StagedBackend::allreduce_sparse(Tensors& tensors,
                                                       const c10d::AllreduceOptions& options) {
  return translated([&] {
    Copies copies("sparse all_reduce");
    Tensors host = copies.both(tensors);
    return run(c10d::OpType::_ALLREDUCE_SPARSE, copies,
               [&] { return cpu_.allreduce_sparse(host, options); });
  });
}

StagedBackend::WorkPtr StagedBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return translated([&] {
    Copies copies("reduce");
    Tensors host = options.rootRank == rank_ ? copies.both(tensors) : copies.read(tensors);
    return run(c10d::OpType::REDUCE, copies, [&] { return cpu_.reduce(host, options); });
  });
}

StagedBackend::WorkPtr StagedBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                     const c10d::ReduceScatterOptions& options) {
  return translated([&] {
    Copies copies("reduce_scatter");
    std::vector<Tensors> from;
    for (const Tensors& list : inputs) from.push_back(copies.read(list));
    Tensors to = copies.write(outputs);
    return run(c10d::OpType::REDUCE_SCATTER, copies,
               [&] { return cpu_.reduce_scatter(to, from, options); });
  });
}

StagedBackend::WorkPtr StagedBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  return translated([&] {
    Copies copies("reduce_scatter_tensor");
    at::Tensor from = copies.read(input), to = copies.write(output);
    return run(c10d::OpType::_REDUCE_SCATTER_BASE, copies,
               [&] { return cpu_._reduce_scatter_base(to, from, options); });
  });
}

StagedBackend::WorkPtr StagedBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  return translated([&] {
    Copies copies("reduce_scatter_tensor_coalesced");
    Tensors from = copies.read(inputs), to = copies.write(outputs);
    return run(c10d::OpType::COALESCED, copies,
               [&] { return cpu_.reduce_scatter_tensor_coalesced(to, from, options); });
  });
}

StagedBackend::WorkPtr StagedBackend::broadcast(Tensors& tensors,
                                                const c10d::BroadcastOptions& options) {
  return translated([&] {
    Copies copies("broadcast");
    Tensors host = options.rootRank == rank_ ? copies.read(tensors) : copies.write(tensors);
    return run(c10d::OpType::BROADCAST, copies, [&] { return cpu_.broadcast(host, options); });
  });
}

StagedBackend::WorkPtr StagedBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                const c10d::AllgatherOptions& options) {
  return translated([&] {
    Copies copies("all_gather");
    Tensors from = copies.read(inputs);
    std::vector<Tensors> to;
    for (const Tensors& list : outputs) to.push_back(copies.write(list));
    return run(c10d::OpType::ALLGATHER, copies, [&] { return cpu_.allgather(to, from, options); });
  });
}

StagedBackend::WorkPtr StagedBackend::allgather_coalesced(std::vector<Tensors>& outputs,
                                                          Tensors& inputs,
                                                          const c10d::AllgatherOptions& options) {
  return translated([&] {
    Copies copies("all_gather_coalesced");
    Tensors from = copies.read(inputs);
    std::vector<Tensors> to;
    for (const Tensors& list : outputs) to.push_back(copies.write(list));
    return run(c10d::OpType::ALLGATHER_COALESCED, copies,
               [&] { return cpu_.allgather_coalesced(to, from, options); });
  });
}

StagedBackend::WorkPtr StagedBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::AllgatherOptions& options) {
  return translated([&] {
    Copies copies("all_gather_into_tensor");
    at::Tensor from = copies.read(input), to = copies.write(output);
    return run(c10d::OpType::_ALLGATHER_BASE, copies,
               [&] { return cpu_._allgather_base(to, from, options); });
  });
}

StagedBackend::WorkPtr StagedBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return translated([&] {
    Copies copies("all_gather_into_tensor_coalesced");
    Tensors from = copies.read(inputs), to = copies.write(outputs);
    return run(c10d::OpType::COALESCED, copies,
               [&] { return cpu_.allgather_into_tensor_coalesced(to, from, options); });
  });
}

StagedBackend::WorkPtr StagedBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                             const c10d::GatherOptions& options) {
  return translated([&] {
    Copies copies("gather");
    Tensors from = copies.read(inputs);
    std::vector<Tensors> to;
    for (const Tensors& list : outputs) to.push_back(copies.write(list));
    return run(c10d::OpType::GATHER, copies, [&] { return cpu_.gather(to, from, options); });
  });
}

StagedBackend::WorkPtr StagedBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                              const c10d::ScatterOptions& options) {
  return translated([&] {
    Copies copies("scatter");
    std::vector<Tensors> from;
    for (const Tensors& list : inputs) from.push_back(copies.read(list));
    Tensors to = copies.write(outputs);
    return run(c10d::OpType::SCATTER, copies, [&] { return cpu_.scatter(to, from, options); });
  });
}

StagedBackend::WorkPtr StagedBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                    std::vector<int64_t>& output_splits,
                                                    std::vector<int64_t>& input_splits,
                                                    const c10d::AllToAllOptions& options) {
  return translated([&] {
    Copies copies("all_to_all_single");
    at::Tensor from = copies.read(input), to = copies.write(output);
    return run(c10d::OpType::ALLTOALL_BASE, copies,
               [&] { return cpu_.alltoall_base(to, from, output_splits, input_splits, options); });
  });
}

StagedBackend::WorkPtr StagedBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                               const c10d::AllToAllOptions& options) {
  return translated([&] {
    Copies copies("all_to_all");
    Tensors from = copies.read(inputs), to = copies.write(outputs);
    return run(c10d::OpType::ALLTOALL, copies, [&] { return cpu_.alltoall(to, from, options); });
  });
}

StagedBackend::WorkPtr StagedBackend::send(Tensors& tensors, int peer, int tag) {
  return translated([&] {
    Copies copies("send");
    Tensors host = copies.read(tensors);
    return run(c10d::OpType::SEND, copies, [&] { return cpu_.send(host, peer, tag); });
  });
}

StagedBackend::WorkPtr StagedBackend::recv(Tensors& tensors, int peer, int tag) {
  return translated([&] {
    Copies copies("recv");
    Tensors host = copies.write(tensors);
    return run(c10d::OpType::RECV, copies, [&] { return cpu_.recv(host, peer, tag); });
  });
}

StagedBackend::WorkPtr StagedBackend::recvAnysource(Tensors& tensors, int tag) {
  return translated([&] {
    Copies copies("recv");
    Tensors host = copies.write(tensors);
    return run(c10d::OpType::RECVANYSOURCE, copies, [&] { return cpu_.recvAnysource(host, tag); });
  });
}

}  // namespace ringreduce
