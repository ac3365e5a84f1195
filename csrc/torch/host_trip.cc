// The copies, and what tells torch's allocators that they are under way.
#include "torch/host_trip.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

namespace ringreduce {
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
  copyIn(streams_.to_gpu, tensor_, host_, tensor_);
}

}  // namespace ringreduce
