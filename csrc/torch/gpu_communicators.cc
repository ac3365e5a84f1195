#include "torch/gpu_communicators.h"

#include "base/error.h"

#ifdef RINGREDUCE_CUDA
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda/communicator/host_communicator.h"
#include "cuda/internode/internode_communicator.h"
#endif

namespace ringreduce {

#ifdef RINGREDUCE_CUDA

std::shared_ptr<cuda::GpuCommunicator> makeHostCommunicator(const std::shared_ptr<Group>& group,
                                                            c10::Device device) {
  return cuda::Communicator::create(group, device.index(),
                                    cuda::CommunicatorOptions::fromEnvironment());
}

std::shared_ptr<cuda::GpuCommunicator> makeInterNodeCommunicator(
    const std::shared_ptr<Group>& group, c10::Device device) {
  return cuda::InterNodeCommunicator::create(group, *group->hosts(), group->local(),
                                             makeHostCommunicator(group->local(), device),
                                             device.index());
}

CUstream_st* handleOf(const c10::Stream& stream) {
  return c10::cuda::CUDAStream(stream).stream();
}

bool isCapturing(c10::Device device) {
  const c10::cuda::CUDAGuard on(device);
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

#else

namespace {

// Nothing gets here: a build without CUDA refuses CUDA tensors (cuda_build.h).
[[noreturn]] void withoutCuda() {
  throw Error(Failure::kArgument, "this ringreduce was built without CUDA");
}

}  // namespace

std::shared_ptr<cuda::GpuCommunicator> makeHostCommunicator(const std::shared_ptr<Group>&,
                                                            c10::Device) {
  withoutCuda();
}

std::shared_ptr<cuda::GpuCommunicator> makeInterNodeCommunicator(const std::shared_ptr<Group>&,
                                                                 c10::Device) {
  withoutCuda();
}

CUstream_st* handleOf(const c10::Stream&) {
  withoutCuda();
}

bool isCapturing(c10::Device) {
  withoutCuda();
}

#endif

}  // namespace ringreduce
