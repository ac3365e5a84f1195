// Torch's calls, checked and turned into operations.
#include "torch/backend.h"

#include <Python.h>
#include <torch/csrc/utils/pybind.h>

#include <mutex>
#include <optional>
#include <utility>

#include "base/error.h"
#include "torch/errors.h"
#include "torch/tensors.h"

namespace ringreduce {
namespace {

// torch's errors carry pages of frames.
template <class F>
auto fromStore(F&& call) {
  try {
    return call();
  } catch (const c10::Error& error) {
    throw Error(Failure::kSetup,
                std::string("the store failed: ") + error.what_without_backtrace());
  }
}

// torch's store, as the rendezvous wants it.
class TorchStore final : public Store {
 public:
  explicit TorchStore(const c10::intrusive_ptr<c10d::Store>& store) : store_(store) {}
  void set(const std::string& key, const std::string& value) override {
    fromStore([&] { store_->set(key, value); });
  }
  std::optional<std::string> get(const std::string& key) override {
    return fromStore([&]() -> std::optional<std::string> {
      if (!store_->check({key})) return std::nullopt;
      return store_->get_to_str(key);
    });
  }
  void remove(const std::string& key) override {
    fromStore([&] { store_->deleteKey(key); });
  }

 private:
  const c10::intrusive_ptr<c10d::Store>& store_;
};

Nanos nanosOf(std::chrono::milliseconds time) {
  return time.count() < kNever / kMillisecond ? time.count() * kMillisecond : kNever;
}

Nanos timeoutOf(std::chrono::milliseconds timeout) {
  return timeout.count() > 0 ? nanosOf(timeout) : 0;  // kUnsetTimeout: the group's
}

ReduceOp opOf(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return ReduceOp::kSum;
    case c10d::ReduceOp::AVG:
      return ReduceOp::kAvg;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOp::kProduct;
    case c10d::ReduceOp::MIN:
      return ReduceOp::kMin;
    case c10d::ReduceOp::MAX:
      return ReduceOp::kMax;
    case c10d::ReduceOp::BAND:
      return ReduceOp::kBand;
    case c10d::ReduceOp::BOR:
      return ReduceOp::kBor;
    case c10d::ReduceOp::BXOR:
      return ReduceOp::kBxor;
    case c10d::ReduceOp::PREMUL_SUM:
      return ReduceOp::kPremulSum;
    default:
      throw Error(Failure::kArgument, "ringreduce all_reduce: an unknown reduce op");
  }
}

double factorOf(const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return 1;
  const auto* supplement = dynamic_cast<const c10d::PreMulSumSupplement*>(op.supplement_.get());
  if (!supplement) throw Error(Failure::kArgument, "ringreduce: PREMUL_SUM without its factor");
  return supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>()
                                             : supplement->double_factor;
}

[[noreturn]] void notYet(const char* call, const char* who) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "ringreduce does not have ", call, " yet; ", who,
                              " has it.  It offers all_reduce, broadcast, all_gather, "
                              "all_gather_into_tensor and barrier.");
}

// The groups that are alive, for shutdownAll.
struct LiveGroups {
  std::mutex mutex;
  std::vector<std::weak_ptr<Group>> groups;

  void add(const std::shared_ptr<Group>& group) {
    const std::lock_guard lock(mutex);
    std::erase_if(groups, [](const auto& g) { return g.expired(); });
    groups.push_back(group);
  }
};

LiveGroups& liveGroups() {
  static auto* all = new LiveGroups;  // never destroyed: used while the process exits
  return *all;
}

}  // namespace

Backend& asRingreduce(c10d::Backend& backend) {
  auto* ours = dynamic_cast<Backend*>(&backend);
  TORCH_CHECK(ours, "a ringreduce group is needed, not one of ", backend.getBackendName());
  return *ours;
}

Backend::Backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                 const GroupOptions& options)
    : c10d::Backend(rank, size) {
  TorchStore adapted(store);
  group_ = translated([&] { return Group::create(adapted, rank, size, options); });
  liveGroups().add(group_);
}

Backend::~Backend() {
  // Completions that are under way may want the interpreter, so it must not be held while they end.
  std::optional<pybind11::gil_scoped_release> released;
  if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
  group_.reset();
}

c10::intrusive_ptr<c10d::Backend::Options> Backend::getBackendOptions() {
  return c10::make_intrusive<Options>("ringreduce",
                                      std::chrono::milliseconds(group_->timeout() / kMillisecond));
}

void Backend::setTimeout(std::chrono::milliseconds timeout) {
  group_->setTimeout(nanosOf(timeout));
}

Backend::WorkPtr Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return translated([&] {
    const at::Tensor& tensor = onlyOne(tensors, "all_reduce");
    const Staged staged(tensor, Staged::Use::kBoth, "all_reduce");
    return Work::start(*group_,
                       {.type = c10d::OpType::ALLREDUCE,
                        .title = "ringreduce:all_reduce",
                        .inputs = tensors,
                        .outputs = tensors,
                        .operation = {AllReduce{.data = staged.data(),
                                                .count = static_cast<size_t>(tensor.numel()),
                                                .dtype = dtypeOf(tensor, "all_reduce"),
                                                .op = opOf(options.reduceOp),
                                                .factor = factorOf(options.reduceOp)},
                                      timeoutOf(options.timeout), [staged] { staged.giveBack(); }}},
                       !options.asyncOp);
  });
}

c10::intrusive_ptr<c10::ivalue::Future> Backend::averageBucket(const at::Tensor& bucket,
                                                               Context context) {
  return translated([&] {
    requireDense(bucket, "DDP hook");
    const Staged staged(bucket, Staged::Use::kBoth, "DDP hook");
    return Work::start(*group_,
                       {.type = c10d::OpType::ALLREDUCE,
                        .title = "ringreduce:all_reduce",
                        .inputs = {bucket},
                        .outputs = {bucket},
                        .operation = {AllReduce{.data = staged.data(),
                                                .count = static_cast<size_t>(bucket.numel()),
                                                .dtype = dtypeOf(bucket, "DDP hook"),
                                                .op = ReduceOp::kAvg},
                                      0, [staged] { staged.giveBack(); }},
                        .context = std::move(context),
                        .future_of_one = true},
                       /*blocking=*/false)
        ->getFuture();
  });
}

Backend::WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return translated([&] {
    const at::Tensor& tensor = onlyOne(tensors, "broadcast");
    const bool root = options.rootRank == rank_;
    const Staged staged(tensor, root ? Staged::Use::kRead : Staged::Use::kWrite, "broadcast");
    return Work::start(*group_,
                       {.type = c10d::OpType::BROADCAST,
                        .title = "ringreduce:broadcast",
                        .inputs = tensors,
                        .outputs = tensors,
                        .operation = {Broadcast{.data = staged.data(),
                                                .count = static_cast<size_t>(tensor.numel()),
                                                .dtype = dtypeOf(tensor, "broadcast"),
                                                .root = static_cast<int>(options.rootRank)},
                                      timeoutOf(options.timeout), [staged] { staged.giveBack(); }}},
                       !options.asyncOp);
  });
}

Backend::WorkPtr Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                    const c10d::AllgatherOptions& options) {
  return translated([&] {
    const at::Tensor& input = onlyOne(inputs, "all_gather");
    const DType dtype = dtypeOf(input, "all_gather");
    if (outputs.size() != 1 || outputs[0].size() != static_cast<size_t>(size_))
      throw Error(Failure::kArgument, "ringreduce all_gather: needs a list of " +
                                          std::to_string(size_) +
                                          " output tensors, one for each rank");
    const at::Tensor dense = input.detach().contiguous();
    AllGather gather{.input = dense.data_ptr(),
                     .outputs = {},
                     .count = static_cast<size_t>(input.numel()),
                     .dtype = dtype};
    std::vector<Staged> staged;
    for (const at::Tensor& output : outputs[0]) {
      requireDense(output, "all_gather");
      if (output.numel() != input.numel() || output.scalar_type() != input.scalar_type())
        throw Error(Failure::kArgument,
                    c10::str("ringreduce all_gather: each output must have the input's ",
                             input.numel(), " elements of ", input.scalar_type(), ", one has ",
                             output.numel(), " of ", output.scalar_type()));
      staged.emplace_back(output, Staged::Use::kWrite, "all_gather");
      gather.outputs.push_back(staged.back().data());
    }
    return Work::start(*group_,
                       {.type = c10d::OpType::ALLGATHER,
                        .title = "ringreduce:all_gather",
                        .inputs = inputs,
                        .outputs = outputs[0],
                        .operation = {std::move(gather), timeoutOf(options.timeout),
                                      [staged = std::move(staged), dense] {
                                        for (const Staged& part : staged) part.giveBack();
                                      }}},
                       !options.asyncOp);
  });
}

Backend::WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::AllgatherOptions& options) {
  return translated([&] {
    requireDense(input, "all_gather_into_tensor");
    requireDense(output, "all_gather_into_tensor");
    const DType dtype = dtypeOf(input, "all_gather_into_tensor");
    if (output.numel() != input.numel() * size_ || output.scalar_type() != input.scalar_type())
      throw Error(Failure::kArgument,
                  c10::str("ringreduce all_gather_into_tensor: the output must have ",
                           input.numel() * size_, " elements of ", input.scalar_type(),
                           " (the input's times the world size), it has ", output.numel(), " of ",
                           output.scalar_type()));
    const at::Tensor dense = input.detach().contiguous();
    const Staged staged(output, Staged::Use::kWrite, "all_gather_into_tensor");
    AllGather gather{.input = dense.data_ptr(),
                     .outputs = {},
                     .count = static_cast<size_t>(input.numel()),
                     .dtype = dtype};
    for (int r = 0; r < size_; ++r)
      gather.outputs.push_back(static_cast<std::byte*>(staged.data()) +
                               static_cast<size_t>(r) * gather.count * sizeOf(dtype));
    return Work::start(*group_,
                       {.type = c10d::OpType::_ALLGATHER_BASE,
                        .title = "ringreduce:all_gather_into_tensor",
                        .inputs = {input},
                        .outputs = {output},
                        .operation = {std::move(gather), timeoutOf(options.timeout),
                                      [staged, dense] { staged.giveBack(); }}},
                       !options.asyncOp);
  });
}

Backend::WorkPtr Backend::barrier(const c10d::BarrierOptions& options) {
  return translated([&] {
    return Work::start(*group_,
                       {.type = c10d::OpType::BARRIER,
                        .title = "ringreduce:barrier",
                        .operation = {Barrier{}, timeoutOf(options.timeout)}},
                       !options.asyncOp);
  });
}

c10d::ErrorType Backend::getError() {
  switch (group_->failure()) {
    case Failure::kNone:
      return c10d::ErrorType::SUCCESS;
    case Failure::kTimeout:
      return c10d::ErrorType::TIMEOUT;
    case Failure::kPeerLost:
      return c10d::ErrorType::REMOTE_ERROR;
    default:
      return c10d::ErrorType::COMM_ERROR;
  }
}

void Backend::abort() {
  translated([&] { group_->abort("abort() was called"); });
}

void Backend::shutdown() {
  group_->shutdown();
}

void Backend::shutdownAll() {
  std::vector<std::weak_ptr<Group>> groups;
  {
    const std::lock_guard lock(liveGroups().mutex);
    groups.swap(liveGroups().groups);
  }
  for (const auto& weak : groups)
    if (const auto group = weak.lock()) group->shutdown();
}

// ---- not there yet

Backend::WorkPtr Backend::allreduce_sparse(Tensors&, const c10d::AllreduceOptions&) {
  notYet("all_reduce of sparse tensors", "gloo");
}
Backend::WorkPtr Backend::allreduce_coalesced(Tensors&, const c10d::AllreduceCoalescedOptions&) {
  notYet("all_reduce_coalesced", "gloo");
}
Backend::WorkPtr Backend::reduce(Tensors&, const c10d::ReduceOptions&) {
  notYet("reduce", "gloo");
}
Backend::WorkPtr Backend::allgather_coalesced(std::vector<Tensors>&, Tensors&,
                                              const c10d::AllgatherOptions&) {
  notYet("all_gather_coalesced", "gloo");
}
Backend::WorkPtr Backend::allgather_into_tensor_coalesced(Tensors&, Tensors&,
                                                          const c10d::AllgatherOptions&) {
  notYet("all_gather_into_tensor_coalesced", "gloo");
}
Backend::WorkPtr Backend::gather(std::vector<Tensors>&, Tensors&, const c10d::GatherOptions&) {
  notYet("gather", "gloo");
}
Backend::WorkPtr Backend::scatter(Tensors&, std::vector<Tensors>&, const c10d::ScatterOptions&) {
  notYet("scatter", "gloo");
}
Backend::WorkPtr Backend::reduce_scatter(Tensors&, std::vector<Tensors>&,
                                         const c10d::ReduceScatterOptions&) {
  notYet("reduce_scatter", "gloo");
}
Backend::WorkPtr Backend::_reduce_scatter_base(at::Tensor&, at::Tensor&,
                                               const c10d::ReduceScatterOptions&) {
  notYet("reduce_scatter_tensor", "gloo");
}
Backend::WorkPtr Backend::reduce_scatter_tensor_coalesced(Tensors&, Tensors&,
                                                          const c10d::ReduceScatterOptions&) {
  notYet("reduce_scatter_tensor_coalesced", "gloo");
}
Backend::WorkPtr Backend::alltoall_base(at::Tensor&, at::Tensor&, std::vector<int64_t>&,
                                        std::vector<int64_t>&, const c10d::AllToAllOptions&) {
  notYet("all_to_all_single", "gloo");
}
Backend::WorkPtr Backend::alltoall(Tensors&, Tensors&, const c10d::AllToAllOptions&) {
  notYet("all_to_all", "gloo");
}
Backend::WorkPtr Backend::send(Tensors&, int, int) {
  notYet("send", "gloo");
}
Backend::WorkPtr Backend::recv(Tensors&, int, int) {
  notYet("recv", "gloo");
}
Backend::WorkPtr Backend::recvAnysource(Tensors&, int) {
  notYet("recv from any rank", "gloo");
}
void Backend::monitoredBarrier(const c10d::BarrierOptions&, bool) {
  notYet("monitored_barrier", "gloo");
}

}  // namespace ringreduce
