// Where torch's glue meets the data plane of GPUs: the only part of it that needs CUDA to be built.
// The rest knows streams and events by torch's interface for all kinds of devices.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <memory>

#include "cuda/communicator/gpu_communicator.h"
#include "group/group.h"

namespace ringreduce {

// Collective over the group: the communicator of its ranks' GPUs, `device` this rank's.  Throws
// Error.
std::shared_ptr<cuda::GpuCommunicator> makeHostCommunicator(const std::shared_ptr<Group>& group,
                                                            c10::Device device);

// The same over several hosts.
std::shared_ptr<cuda::GpuCommunicator> makeInterNodeCommunicator(
    const std::shared_ptr<Group>& group, c10::Device device);

// As the data plane takes it.
CUstream_st* handleOf(const c10::Stream& stream);

// Whether what is put into the device's current stream is kept for a CUDA graph and not run.
bool isCapturing(c10::Device device);

}  // namespace ringreduce
