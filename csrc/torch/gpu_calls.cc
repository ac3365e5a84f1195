// The calls that a communicator of GPUs performs: torch's arguments, checked and turned into the
// communicator's calls.
//
// A check that fails here raises ValueError before anything is put into a stream.
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "torch/arguments.h"
#include "torch/errors.h"
#include "torch/gpu_backend.h"

namespace ringreduce {
namespace {

using Use = Staged::Use;

// PREMUL_SUM's factor as the communicator takes it: a tensor stays on its device.
struct GpuFactor {
  double number;
  at::Tensor tensor;  // of float64 for float64 and else of float32
  const void* onDevice() const { return tensor.defined() ? tensor.const_data_ptr() : nullptr; }
};

GpuFactor factorOn(const c10d::ReduceOp& op, const at::Tensor& of, const char* call) {
  const Factor factor = factorOf(op);
  if (!factor.tensor.defined() || !factor.tensor.is_cuda()) return {numberOf(factor), {}};
  if (factor.tensor.numel() != 1 || factor.tensor.device() != of.device())
    refuse(call, c10::str("PREMUL_SUM's factor must be one number on ", of.device(), "; it has ",
                          factor.tensor.numel(), " on ", factor.tensor.device()));
  return {1, factor.tensor.detach().to(of.scalar_type() == at::kDouble ? at::kDouble : at::kFloat)};
}

// One of the calls' arguments, in dense memory.
struct Dense {
  at::Tensor real;  // as `addable` sees it
  Staged staged;
  Dense(const at::Tensor& tensor, ReduceOp op, Use use, const char* call)
      : real(addable(tensor, op, call)), staged(real, use, call) {}
};

bool haveSameSize(const std::vector<at::Tensor>& tensors, const at::Tensor& as) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return tensor.defined() && tensor.numel() == as.numel();
  });
}

std::vector<at::Tensor> joined(const std::vector<Tensors>& lists) {
  std::vector<at::Tensor> all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

// Copies the inputs that overlap an output, except where this rank's own part lies in place.  NCCL,
// to which the call may go, allows that one overlap too.
std::vector<at::Tensor> copySharedInputs(const std::vector<at::Tensor>& inputs,
                                         const std::vector<at::Tensor>& outputs, bool gathers,
                                         int rank, const char* call) {
  const OutputMemory written(outputs, call);
  std::vector<at::Tensor> all;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor* const output = i < outputs.size() ? &outputs[i] : nullptr;
    const bool in_place = output && (gathers ? isPartOf(inputs[i], *output, rank)
                                             : isPartOf(*output, inputs[i], rank));
    all.push_back(written.copyIfShared(inputs[i], in_place ? output : nullptr));
  }
  return all;
}

}  // namespace

GpuBackend::WorkPtr GpuBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return translated([&]() -> WorkPtr {
    constexpr auto kCall = "all_reduce";
    if (tensors.size() == 1 && tensors[0].defined() && tensors[0].is_sparse())
      return allreduce_sparse(tensors, options);
    const c10::Device device = onlyOne(tensors, kCall, tensors.at(0).device()).device();
    if (!performs(device, Kind::kAllReduce))
      return other(tensors[0], options.reduceOp)->allreduce(tensors, options);
    c10d::AllreduceCoalescedOptions all;
    static_cast<c10d::AllreduceOptions&>(all) = options;
    return allreduce_coalesced(tensors, all);
  });
}

GpuBackend::WorkPtr GpuBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return translated([&]() -> WorkPtr {
    constexpr auto kCall = "all_reduce";
    requireSome(tensors, kCall);
    const c10::Device device = tensors[0].device();
    if (!performs(device, Kind::kAllReduce))
      return other(tensors[0], options.reduceOp)->allreduce_coalesced(tensors, options);
    const ReduceOp op = opOf(options.reduceOp, kCall);
    for (const at::Tensor& tensor : tensors) requireDense(tensor, kCall, device);
    // Tensors that share memory are all read before one is written.
    const bool copied = anyShareMemory(tensors);
    const at::NoGradGuard no_grad;
    Tensors copies = tensors;
    std::vector<Dense> all;
    for (at::Tensor& tensor : copies) {
      if (copied) {
        requireDisjoint({tensor}, kCall);
        tensor = tensor.detach().clone(at::MemoryFormat::Contiguous);
      }
      all.emplace_back(tensor, op, Use::kBoth, kCall);
    }
    std::vector<cuda::GpuAllReduce> calls;
    Tensors used = tensors;
    for (const Dense& one : all) {
      const GpuFactor factor = factorOn(options.reduceOp, one.real, kCall);
      used.insert(used.end(), {one.staged.memory(), factor.tensor});
      calls.push_back({.input = one.staged.data(),
                       .output = one.staged.data(),
                       .count = countOf(one.real),
                       .dtype = dtypeOf(one.real, kCall),
                       .op = op,
                       .factor = factor.number,
                       .factor_on_device = factor.onDevice(),
                       .timeout = timeoutOf(options.timeout)});
    }
    const bool single = tensors.size() == 1;
    return enqueue({single ? c10d::OpType::ALLREDUCE : c10d::OpType::ALLREDUCE_COALESCED,
                    "ringreduce:all_reduce", tensors, tensors},
                   device, options.asyncOp, used,
                   [&](cuda::GpuCommunicator& communicator, const c10::Stream& stream) {
                     for (size_t i = 0; i < calls.size(); ++i) {
                       communicator.allReduce(calls[i], handleOf(stream));
                       all[i].staged.giveBack();
                     }
                     for (size_t i = 0; copied && i < tensors.size(); ++i)
                       tensors[i].detach().copy_(copies[i]);
                   });
  });
}

BucketAverage GpuBackend::averageBucket(const at::Tensor& bucket, uint64_t borders,
                                        Context context) {
  return translated([&]() -> BucketAverage {
    constexpr auto kCall = "DDP hook";
    if (!bucket.is_sparse()) requireDense(bucket, kCall, bucket.device());
    if (bucket.is_sparse() || !performs(bucket.device(), Kind::kAllReduce)) {
      Tensors tensors = {bucket};
      c10d::AllreduceOptions options;
      options.reduceOp = c10d::ReduceOp::AVG;
      options.asyncOp = true;
      const BackendPtr taker = other(bucket);
      const WorkPtr work = bucket.is_sparse() ? taker->allreduce_sparse(tensors, options)
                                              : taker->allreduce(tensors, options);
      const auto first = [](c10::ivalue::Future& done) {
        return done.value().toTensorVector().at(0);
      };
      return {work, work->getFuture()->then(first, c10::TensorType::get())};
    }
    moveBucket(bucket);
    const Staged staged(bucket, Use::kBoth, kCall);
    const cuda::GpuAllReduce call{.input = staged.data(),
                                  .output = staged.data(),
                                  .count = countOf(bucket),
                                  .dtype = dtypeOf(bucket, kCall),
                                  .op = ReduceOp::kAvg,
                                  .label = std::move(context),
                                  .borders = borders};
    const WorkPtr work =
        enqueue({.type = c10d::OpType::ALLREDUCE,
                 .title = "ringreduce:all_reduce",
                 .inputs = {bucket},
                 .outputs = {bucket},
                 .future_of_one = true},
                bucket.device(), /*async=*/true, {bucket, staged.memory()},
                [&](cuda::GpuCommunicator& communicator, const c10::Stream& stream) {
                  communicator.allReduce(call, handleOf(stream));
                  staged.giveBack();
                });
    return {work, work->getFuture()};
  });
}

GpuBackend::WorkPtr GpuBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                     const c10d::ReduceScatterOptions& options) {
  Tensors outputs = {output}, inputs = {input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

GpuBackend::WorkPtr GpuBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  return translated([&]() -> WorkPtr {
    constexpr auto kCall = "reduce_scatter_tensor";
    requirePairs(outputs, inputs, kCall);
    const bool single = inputs.size() == 1;
    const c10::Device device = inputs[0].device();
    Tensors sources = copySharedInputs(inputs, outputs, /*gathers=*/false, rank_, kCall);
    if (!performs(device, Kind::kReduceScatter))
      return single ? other(inputs[0], options.reduceOp)
                          ->_reduce_scatter_base(outputs[0], sources[0], options)
                    : other(inputs[0], options.reduceOp)
                          ->reduce_scatter_tensor_coalesced(outputs, sources, options);
    const ReduceOp op = opOf(options.reduceOp, kCall);
    std::vector<Dense> from, to;
    std::vector<cuda::GpuReduceScatter> calls;
    Tensors used = inputs;
    used.insert(used.end(), outputs.begin(), outputs.end());
    for (const at::Tensor& output : outputs) requireDense(output, kCall, device);
    for (size_t i = 0; i < inputs.size(); ++i) {
      requireDense(inputs[i], kCall, device);
      requireLike(inputs[i], outputs[i].numel() * size_, outputs[i], kCall,
                  "the input (the output's size times the world size)");
      const Dense& in = from.emplace_back(sources[i], op, Use::kRead, kCall);
      const Dense& out = to.emplace_back(outputs[i], op, Use::kWrite, kCall);
      const GpuFactor factor = factorOn(options.reduceOp, out.real, kCall);
      used.insert(used.end(), {in.staged.memory(), out.staged.memory(), factor.tensor});
      calls.push_back({.input = in.staged.data(),
                       .output = out.staged.data(),
                       .count = countOf(out.real),
                       .dtype = dtypeOf(out.real, kCall),
                       .op = op,
                       .factor = factor.number,
                       .factor_on_device = factor.onDevice(),
                       .timeout = timeoutOf(options.timeout)});
    }
    return enqueue({single ? c10d::OpType::_REDUCE_SCATTER_BASE : c10d::OpType::COALESCED,
                    "ringreduce:reduce_scatter_tensor", inputs, outputs},
                   device, options.asyncOp, used,
                   [&](cuda::GpuCommunicator& communicator, const c10::Stream& stream) {
                     for (size_t i = 0; i < calls.size(); ++i) {
                       communicator.reduceScatter(calls[i], handleOf(stream));
                       to[i].staged.giveBack();
                     }
                   });
  });
}

// From a list: copied into one tensor first.  Uneven parts are the other backend's.
GpuBackend::WorkPtr GpuBackend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                               const c10d::ReduceScatterOptions& options) {
  return translated([&]() -> WorkPtr {
    constexpr auto kCall = "reduce_scatter";
    const at::Tensor output = onlyOne(outputs, kCall, outputs.at(0).device());
    const Tensors& list = onlyList(inputs, static_cast<size_t>(size_), kCall, "input");
    if (!haveSameSize(list, output) || !performs(output.device(), Kind::kReduceScatter)) {
      std::vector<Tensors> sources = {OutputMemory(outputs, kCall).copyIfShared(list)};
      return other(output, options.reduceOp)->reduce_scatter(outputs, sources, options);
    }
    for (const at::Tensor& input : list)
      requireLike(input, output.numel(), output, kCall, "each input");
    const at::NoGradGuard no_grad;
    Tensors flat;
    for (const at::Tensor& tensor : list) flat.push_back(tensor.detach().reshape({-1}));
    Tensors whole = {at::cat(flat)};
    return reduce_scatter_tensor_coalesced(outputs, whole, options);
  });
}

GpuBackend::WorkPtr GpuBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return translated([&]() -> WorkPtr {
    constexpr auto kCall = "broadcast";
    const at::Tensor& tensor = onlyOne(tensors, kCall, tensors.at(0).device());
    if (!performs(tensor.device(), Kind::kBroadcast))
      return other(tensor)->broadcast(tensors, options);
    const bool root = options.rootRank == rank_;
    const Staged staged(tensor, root ? Use::kRead : Use::kWrite, kCall);
    const cuda::GpuBroadcast call{.data = staged.data(),
                                  .count = countOf(tensor),
                                  .dtype = dtypeOf(tensor, kCall),
                                  .root = static_cast<int>(options.rootRank),
                                  .timeout = timeoutOf(options.timeout)};
    return enqueue({c10d::OpType::BROADCAST, "ringreduce:broadcast", tensors, tensors},
                   tensor.device(), options.asyncOp, {tensor, staged.memory()},
                   [&](cuda::GpuCommunicator& communicator, const c10::Stream& stream) {
                     communicator.broadcast(call, handleOf(stream));
                     staged.giveBack();
                   });
  });
}

GpuBackend::WorkPtr GpuBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::AllgatherOptions& options) {
  Tensors outputs = {output}, inputs = {input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

GpuBackend::WorkPtr GpuBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return translated([&]() -> WorkPtr {
    constexpr auto kCall = "all_gather_into_tensor";
    requirePairs(outputs, inputs, kCall);
    const bool single = inputs.size() == 1;
    const c10::Device device = inputs[0].device();
    Tensors sources = copySharedInputs(inputs, outputs, /*gathers=*/true, rank_, kCall);
    if (!performs(device, Kind::kAllGather))
      return single ? other(inputs[0])->_allgather_base(outputs[0], sources[0], options)
                    : other(inputs[0])->allgather_into_tensor_coalesced(outputs, sources, options);
    std::vector<Staged> from, to;
    std::vector<cuda::GpuAllGather> calls;
    Tensors used = inputs;
    used.insert(used.end(), outputs.begin(), outputs.end());
    for (const at::Tensor& output : outputs) requireDense(output, kCall, device);
    for (size_t i = 0; i < inputs.size(); ++i) {
      requireDense(inputs[i], kCall, device);
      requireLike(outputs[i], inputs[i].numel() * size_, inputs[i], kCall,
                  "the output (the input's size times the world size)");
      from.emplace_back(sources[i], Use::kRead, kCall);
      to.emplace_back(outputs[i], Use::kWrite, kCall);
      used.insert(used.end(), {from.back().memory(), to.back().memory()});
      calls.push_back({.input = from.back().data(),
                       .output = to.back().data(),
                       .count = countOf(inputs[i]),
                       .dtype = dtypeOf(inputs[i], kCall),
                       .timeout = timeoutOf(options.timeout)});
    }
    return enqueue({single ? c10d::OpType::_ALLGATHER_BASE : c10d::OpType::COALESCED,
                    "ringreduce:all_gather", inputs, outputs},
                   device, options.asyncOp, used,
                   [&](cuda::GpuCommunicator& communicator, const c10::Stream& stream) {
                     for (size_t i = 0; i < calls.size(); ++i) {
                       communicator.allGather(calls[i], handleOf(stream));
                       to[i].giveBack();
                     }
                   });
  });
}

// Into lists: by way of one tensor for each input.  Uneven parts are the other backend's.
GpuBackend::WorkPtr GpuBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  return translated([&]() -> WorkPtr {
    constexpr auto kCall = "all_gather";
    requireSome(inputs, kCall);
    const c10::Device device = inputs[0].device();
    const auto size = static_cast<size_t>(size_);
    bool even = outputs.size() == size;
    for (const Tensors& list : outputs) {
      even &= list.size() == inputs.size();
      for (size_t i = 0; even && i < inputs.size(); ++i)
        even &= list[i].defined() && list[i].numel() == inputs[i].numel();
    }
    Tensors results = joined(outputs);
    const OutputMemory written(results, kCall);
    if (!even || !performs(device, Kind::kAllGather)) {
      Tensors sources = written.copyIfShared(inputs);
      return other(inputs[0])->allgather_coalesced(outputs, sources, options);
    }
    std::vector<Staged> from;
    std::vector<at::Tensor> whole;
    std::vector<cuda::GpuAllGather> calls;
    Tensors used = inputs;
    used.insert(used.end(), results.begin(), results.end());
    for (size_t i = 0; i < inputs.size(); ++i) {
      requireDense(inputs[i], kCall, device);
      for (const Tensors& list : outputs)
        requireLike(list[i], inputs[i].numel(), inputs[i], kCall, "each output");
      from.emplace_back(inputs[i], Use::kRead, kCall);
      whole.push_back(at::empty({size_, inputs[i].numel()},
                                inputs[i].options().memory_format(at::MemoryFormat::Contiguous)));
      used.insert(used.end(), {from.back().memory(), whole.back()});
      calls.push_back({.input = from.back().data(),
                       .output = whole.back().data_ptr(),
                       .count = countOf(inputs[i]),
                       .dtype = dtypeOf(inputs[i], kCall),
                       .timeout = timeoutOf(options.timeout)});
    }
    const bool single = inputs.size() == 1;
    return enqueue(
        {single ? c10d::OpType::ALLGATHER : c10d::OpType::ALLGATHER_COALESCED,
         "ringreduce:all_gather", inputs, std::move(results)},
        device, options.asyncOp, used,
        [&](cuda::GpuCommunicator& communicator, const c10::Stream& stream) {
          const at::NoGradGuard no_grad;
          // All inputs are read before an output is written, because they may overlap.
          for (const cuda::GpuAllGather& call : calls)
            communicator.allGather(call, handleOf(stream));
          for (size_t i = 0; i < calls.size(); ++i) {
            for (size_t r = 0; r < size; ++r)
              outputs[r][i].detach().copy_(
                  whole[i].select(0, static_cast<int64_t>(r)).view(outputs[r][i].sizes()));
          }
        });
  });
}

GpuBackend::WorkPtr GpuBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) {
  return translated([&]() -> WorkPtr {
    constexpr auto kCall = "all_gather";
    const at::Tensor& input = onlyOne(inputs, kCall, inputs.at(0).device());
    const Tensors& list = onlyList(outputs, static_cast<size_t>(size_), kCall, "output");
    if (!haveSameSize(list, input) || !performs(input.device(), Kind::kAllGather)) {
      Tensors sources = OutputMemory(list, kCall).copyIfShared(inputs);
      return other(input)->allgather(outputs, sources, options);
    }
    std::vector<Tensors> by_rank;
    for (const at::Tensor& output : list) by_rank.push_back({output});
    return allgather_coalesced(by_rank, inputs, options);
  });
}

// ---- calls on CUDA tensors that no communicator performs: the choice of the backend that takes
// them

namespace {

bool isKnownToNccl(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  if (op == c10d::ReduceOp::BAND || op == c10d::ReduceOp::BOR || op == c10d::ReduceOp::BXOR)
    return false;
  constexpr at::ScalarType kTypes[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kChar,
                                       at::kByte,  at::kInt,    at::kLong, at::kBool};
  return tensor.layout() == at::kStrided && std::ranges::count(kTypes, tensor.scalar_type()) > 0;
}

}  // namespace

GpuBackend::BackendPtr GpuBackend::nccl() {
  if (!nccl_) nccl_ = make_nccl_();
  return *nccl_;
}

GpuBackend::BackendPtr GpuBackend::other(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  const std::lock_guard lock(mutex_);
  BackendPtr chosen = staged_;
  if (tensor.defined() && isKnownToNccl(tensor, op))
    if (BackendPtr made = nccl()) chosen = std::move(made);
  if (chosen == staged_ && tensor.defined() && isCapturing(tensor.device()))
    throw Error(
        Failure::kArgument,
        "ringreduce: this call goes through the host's memory here, which no CUDA graph can "
        "hold; make it outside of the capture");
  if (coalescing_ && std::find(others_coalesce_.begin(), others_coalesce_.end(), chosen) ==
                         others_coalesce_.end()) {
    chosen->startCoalescing();
    others_coalesce_.push_back(chosen);
  }
  if (tensor.defined() && tensor.is_cuda()) others_on_.insert(tensor.device().index());
  return chosen;
}

GpuBackend::WorkPtr GpuBackend::allreduce_sparse(Tensors& tensors,
                                                 const c10d::AllreduceOptions& options) {
  return other(tensors)->allreduce_sparse(tensors, options);
}

GpuBackend::WorkPtr GpuBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return other(tensors.at(0), options.reduceOp)->reduce(tensors, options);
}

GpuBackend::WorkPtr GpuBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                       const c10d::GatherOptions& options) {
  return translated([&] {
    const Tensors written = outputs.empty() ? Tensors() : outputs[0];
    Tensors from = OutputMemory(written, "gather").copyIfShared(inputs);
    return other(inputs)->gather(outputs, from, options);
  });
}

GpuBackend::WorkPtr GpuBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                        const c10d::ScatterOptions& options) {
  return translated([&] {
    const OutputMemory written(outputs, "scatter");
    std::vector<Tensors> from;
    for (const Tensors& list : inputs) from.push_back(written.copyIfShared(list));
    return other(outputs)->scatter(outputs, from, options);
  });
}

GpuBackend::WorkPtr GpuBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<int64_t>& output_splits,
                                              std::vector<int64_t>& input_splits,
                                              const c10d::AllToAllOptions& options) {
  return translated([&] {
    at::Tensor from = OutputMemory({output}, "all_to_all_single").copyIfShared(input);
    return other(input)->alltoall_base(output, from, output_splits, input_splits, options);
  });
}

GpuBackend::WorkPtr GpuBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                         const c10d::AllToAllOptions& options) {
  return translated([&] {
    Tensors from = OutputMemory(outputs, "all_to_all").copyIfShared(inputs);
    return other(inputs)->alltoall(outputs, from, options);
  });
}

GpuBackend::WorkPtr GpuBackend::send(Tensors& tensors, int peer, int tag) {
  return translated([&] {
    requireTag(tag, "send");
    return other(tensors)->send(tensors, peer, tag);
  });
}

GpuBackend::WorkPtr GpuBackend::recv(Tensors& tensors, int peer, int tag) {
  return translated([&] {
    requireTag(tag, "recv");
    return other(tensors)->recv(tensors, peer, tag);
  });
}

GpuBackend::WorkPtr GpuBackend::recvAnysource(Tensors& tensors, int tag) {
  return translated([&] {
    requireTag(tag, "recv");
    return other(tensors)->recvAnysource(tensors, tag);
  });
}

GpuBackend::WorkPtr GpuBackend::barrier(const c10d::BarrierOptions& options) {
  return translated([&] {
    c10d::BarrierOptions mine = options;
    BackendPtr made;
    {
      const std::lock_guard lock(mutex_);
      made = nccl();
      // Or else NCCL guesses a device by the rank's number.
      if (mine.device_ids.empty())
        mine.device_ids = {contexts_.empty()
                               ? c10::impl::VirtualGuardImpl(at::kCUDA).getDevice().index()
                               : contexts_.begin()->first};
    }
    if (!made)
      throw Error(Failure::kArgument,
                  "ringreduce barrier: between hosts it takes NCCL, which cannot start here");
    return made->barrier(mine);
  });
}

}  // namespace ringreduce
