// The calls on CUDA tensors that no communicator of GPUs performs: which backend takes them.
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "base/error.h"
#include "torch/errors.h"
#include "torch/gpu_backend.h"
#include "torch/gpu_communicators.h"

namespace ringreduce {
namespace {

bool isKnownToNccl(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  if (op == c10d::ReduceOp::BAND || op == c10d::ReduceOp::BOR || op == c10d::ReduceOp::BXOR)
    return false;
  switch (tensor.scalar_type()) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kChar:
    case at::kByte:
    case at::kInt:
    case at::kLong:
    case at::kBool:
      return tensor.layout() == at::kStrided;
    default:
      return false;
  }
}

}  // namespace

c10d::Backend* GpuBackend::nccl() {
  if (!nccl_) nccl_ = make_nccl_();
  return nccl_->get();
}

c10d::Backend& GpuBackend::other(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  const std::lock_guard lock(mutex_);
  c10d::Backend* chosen = staged_.get();
  if (tensor.defined() && isKnownToNccl(tensor, op))
    if (c10d::Backend* made = nccl()) chosen = made;
  if (chosen == staged_.get() && tensor.defined() && isCapturing(tensor.device()))
    throw Error(
        Failure::kArgument,
        "ringreduce: this call goes through the host's memory here, which no CUDA graph can "
        "hold; make it outside of the capture");
  if (coalescing_ && std::find(others_coalesce_.begin(), others_coalesce_.end(), chosen) ==
                         others_coalesce_.end()) {
    chosen->startCoalescing();
    others_coalesce_.push_back(chosen);
  }
  return *chosen;
}

GpuBackend::WorkPtr GpuBackend::allreduce_sparse(Tensors& tensors,
                                                 const c10d::AllreduceOptions& options) {
  return other(tensors).allreduce_sparse(tensors, options);
}

GpuBackend::WorkPtr GpuBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return other(tensors.at(0), options.reduceOp).reduce(tensors, options);
}

GpuBackend::WorkPtr GpuBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                       const c10d::GatherOptions& options) {
  const Tensors written = outputs.empty() ? Tensors() : outputs[0];
  Tensors from = OutputMemory(written).copyIfShared(inputs);
  return other(inputs).gather(outputs, from, options);
}

GpuBackend::WorkPtr GpuBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                        const c10d::ScatterOptions& options) {
  std::vector<Tensors> from;
  for (const Tensors& list : inputs) from.push_back(OutputMemory(outputs).copyIfShared(list));
  return other(outputs).scatter(outputs, from, options);
}

GpuBackend::WorkPtr GpuBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                              std::vector<int64_t>& output_splits,
                                              std::vector<int64_t>& input_splits,
                                              const c10d::AllToAllOptions& options) {
  at::Tensor from = OutputMemory({output}).copyIfShared(input);
  return other(input).alltoall_base(output, from, output_splits, input_splits, options);
}

GpuBackend::WorkPtr GpuBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                         const c10d::AllToAllOptions& options) {
  Tensors from = OutputMemory(outputs).copyIfShared(inputs);
  return other(inputs).alltoall(outputs, from, options);
}

GpuBackend::WorkPtr GpuBackend::send(Tensors& tensors, int peer, int tag) {
  return other(tensors).send(tensors, peer, tag);
}

GpuBackend::WorkPtr GpuBackend::recv(Tensors& tensors, int peer, int tag) {
  return other(tensors).recv(tensors, peer, tag);
}

GpuBackend::WorkPtr GpuBackend::recvAnysource(Tensors& tensors, int tag) {
  return other(tensors).recvAnysource(tensors, tag);
}

GpuBackend::WorkPtr GpuBackend::barrier(const c10d::BarrierOptions& options) {
  return translated([&] {
    c10d::BarrierOptions mine = options;
    c10d::Backend* made = nullptr;
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
