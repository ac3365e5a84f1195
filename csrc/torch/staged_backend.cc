// Copies in the host's memory, and the Work that brings results back from them.
#include "torch/staged_backend.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>

#include "base/error.h"
#include "torch/arguments.h"
#include "torch/errors.h"
#include "torch/torch_calls.h"
#include "torch/work.h"

namespace ringreduce {
namespace {

using Use = Staged::Use;

// A call's tensors in the host's memory, and which of them are its results.
class Copies {
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
  // Lists of these, and lists of lists.
  template <class T>
  std::vector<T> read(const std::vector<T>& list) {
    return each(list, [&](const T& one) { return read(one); });
  }
  template <class T>
  std::vector<T> write(const std::vector<T>& list) {
    return each(list, [&](const T& one) { return write(one); });
  }
  Tensors of(const Tensors& list, Use use) {
    if (use == Use::kRead) return read(list);
    if (use == Use::kWrite) return write(list);
    return each(list, [&](const at::Tensor& tensor) { return both(tensor); });
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
  template <class T, class Copy>
  static std::vector<T> each(const std::vector<T>& list, Copy copy) {
    std::vector<T> all;
    for (const T& one : list) all.push_back(copy(one));
    return all;
  }
  static bool isDense(const at::Tensor& tensor) { return tensor.layout() == at::kStrided; }

  // Refuses only tensors whose copies would be accepted; the CPU backend refuses the others.
  bool known(const at::Tensor& tensor) {
    if (!tensor.defined()) return false;
    if (device_ && *device_ != tensor.device())
      refuse(call_, "takes tensors on one device, not on " + device_->str() + " and on " +
                        tensor.device().str());
    device_ = tensor.device();
    return true;
  }
  at::Tensor result(const at::Tensor& tensor, at::Tensor copy) {
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

// Results are copied back once the CPU's Work is over, in the stream of the first caller.
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
    const auto beside = besideCaptures();
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
    const auto beside = besideCaptures();
    const c10::DeviceGuard on(copies_.device());
    const c10::Stream stream = current();
    called_->block(stream);  // earlier work of the caller may use the results' memory
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

class StagedBackend final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  StagedBackend(c10d::Backend& cpu, std::function<void(const std::string&)> abort)
      : c10d::Backend(cpu.getRank(), cpu.getSize()), cpu_(cpu), abort_(std::move(abort)) {}

  const std::string getBackendName() const override { return "ringreduce"; }

#define RINGREDUCE_STAGE(name, Out, In, Options, type, title)                                 \
  WorkPtr name(Out& outputs, In& inputs, const c10d::Options& options) override {             \
    return fromTo(c10d::OpType::type, title, &c10d::Backend::name, outputs, inputs, options); \
  }
  RINGREDUCE_CALLS_FROM_TO(RINGREDUCE_STAGE)
#undef RINGREDUCE_STAGE
#define RINGREDUCE_STAGE(name, Options, type, title)                                       \
  WorkPtr name(Tensors& tensors, const c10d::Options& options) override {                  \
    return onOne(c10d::OpType::type, title, &c10d::Backend::name, tensors, useBy(options), \
                 options);                                                                 \
  }
  RINGREDUCE_CALLS_IN_PLACE(RINGREDUCE_STAGE)
#undef RINGREDUCE_STAGE
  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    return onOne(c10d::OpType::SEND, "send", &c10d::Backend::send, tensors, Use::kRead, peer, tag);
  }
  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    return onOne(c10d::OpType::RECV, "recv", &c10d::Backend::recv, tensors, Use::kWrite, peer, tag);
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return onOne(c10d::OpType::RECVANYSOURCE, "recv", &c10d::Backend::recvAnysource, tensors,
                 Use::kWrite, tag);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& options) override {
    return fromTo(c10d::OpType::ALLTOALL_BASE, "all_to_all_single", &c10d::Backend::alltoall_base,
                  output, input, output_splits, input_splits, options);
  }

  // Every call is started by itself, as it comes.
  void startCoalescing() override {
    const std::lock_guard lock(mutex_);
    coalescing_ = true;
    works_.clear();
  }

  WorkPtr endCoalescing() override {
    const std::lock_guard lock(mutex_);
    coalescing_ = false;
    return c10::make_intrusive<WorkList>(rank_, std::exchange(works_, {}));
  }

 private:
  // What this rank's tensors of a call in place are for.
  template <class Options>
  Use useBy(const Options& options) const {
    if constexpr (std::is_same_v<Options, c10d::ReduceOptions>)
      return options.rootRank == cpu_.getRank() ? Use::kBoth : Use::kRead;
    else if constexpr (std::is_same_v<Options, c10d::BroadcastOptions>)
      return options.rootRank == cpu_.getRank() ? Use::kRead : Use::kWrite;
    else {
      static_assert(!requires { options.rootRank; }, "the root's tensors are for something else");
      return Use::kBoth;
    }
  }

  // `call` makes the copies and starts the CPU's call on them.
  template <class Call>
  WorkPtr run(c10d::OpType type, const char* name, Call&& call) {
    return translated([&] {
      const auto beside = besideCaptures();
      Copies copies(name);
      WorkPtr inner = orAbort([&] { return call(copies); }, abort_);
      WorkPtr work = c10::make_intrusive<StagedWork>(rank_, type, std::move(inner), copies);
      const std::lock_guard lock(mutex_);
      if (coalescing_) works_.push_back(work);
      return work;
    });
  }

  template <class Method, class... Options>
  WorkPtr onOne(c10d::OpType type, const char* name, Method method, const Tensors& tensors, Use use,
                Options&... options) {
    return run(type, name, [&](Copies& copies) {
      Tensors host = copies.of(tensors, use);
      for (const at::Tensor& result : copies.results()) requireDisjoint({result}, name);
      return (cpu_.*method)(host, options...);
    });
  }

  template <class Method, class Outputs, class Inputs, class... Options>
  WorkPtr fromTo(c10d::OpType type, const char* name, Method method, const Outputs& outputs,
                 const Inputs& inputs, Options&... options) {
    return run(type, name, [&](Copies& copies) {
      Inputs from = copies.read(inputs);
      Outputs to = copies.write(outputs);
      requireDisjoint(copies.results(), name);
      return (cpu_.*method)(to, from, options...);
    });
  }

  c10d::Backend& cpu_;  // its rank may change by a reconfigure, after this object is made
  const std::function<void(const std::string&)> abort_;
  std::mutex mutex_;  // of the next two
  bool coalescing_ = false;
  std::vector<WorkPtr> works_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> makeStagedBackend(c10d::Backend& cpu,
                                                    std::function<void(const std::string&)> abort) {
  return c10::make_intrusive<StagedBackend>(cpu, std::move(abort));
}

namespace {

c10::impl::VirtualGuardImpl guardOf(const at::Tensor& tensor) {
  return c10::impl::VirtualGuardImpl(tensor.device().type());
}

// torch does so for pinned memory, but for a GPU's only if it was allocated for the stream.
void copyIn(const c10::Stream& stream, const at::Tensor& to, const at::Tensor& from,
            const at::Tensor& on_gpu) {
  const at::NoGradGuard no_grad;
  if (on_gpu.has_storage())
    guardOf(on_gpu).recordDataPtrOnStream(on_gpu.storage().data_ptr(), stream);
  const c10::StreamGuard in(stream);
  to.copy_(from, /*non_blocking=*/true);
}

}  // namespace

HostTrip::Streams HostTrip::makeStreams(c10::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  return {guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true),
          guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true)};
}

HostTrip::HostTrip(at::Tensor tensor, const Streams& streams)
    : tensor_(tensor.detach()),
      streams_(streams),
      arrived_(tensor.device().type()),
      host_(at::empty(
          tensor.sizes(),
          at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU).pinned_memory(true))) {
  c10::Event ready(tensor.device().type());
  ready.record(guardOf(tensor).getStream(tensor.device()));
  ready.block(streams_.to_host);
  copyIn(streams_.to_host, host_, tensor_, tensor_);
  arrived_.record(streams_.to_host);
}

void HostTrip::giveBack() const {
  const auto beside = besideCaptures();
  copyIn(streams_.to_gpu, tensor_, host_, tensor_);
}

}  // namespace ringreduce
