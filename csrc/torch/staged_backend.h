// Calls on tensors of any device, by way of the host's memory: copies there, the CPU backend's call
// on the copies, and copies of the results back.
//
// Slow; for where NCCL cannot start.  A call waits for the caller's stream and copies its inputs
// before it returns.  Results are copied back, in the stream that is then current, by a wait for
// its Work or Future.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace ringreduce {

// While it is kept, the calling thread can copy and wait although another captures a CUDA graph.
std::shared_ptr<void> besideCaptures();

// `cpu` must live as long as this is called.  `abort` ends the group, and says why.
c10::intrusive_ptr<c10d::Backend> makeStagedBackend(c10d::Backend& cpu,
                                                    std::function<void(const std::string&)> abort);

// A GPU's tensor on its way to the host's memory, to be reduced there, and back.
//
// Copies run in streams beside the caller's, so neither its thread nor its stream waits for them.

class HostTrip {
 public:
  // Of one device.  Two, because a copy to the host may wait for gradients, and no copy back should
  // wait behind it.
  struct Streams {
    c10::Stream to_host, to_gpu;
  };
  static Streams makeStreams(c10::Device device);

  // Starts to copy a tensor to pinned memory, behind the work in its device's current stream.
  HostTrip(at::Tensor tensor, const Streams& streams);

  // Valid once it has arrived.
  const at::Tensor& host() const { return host_; }
  bool hasArrived() const {
    const auto beside = besideCaptures();
    return arrived_.query();
  }

  // Starts to copy it back over the tensor.  Once, after it has arrived.
  void giveBack() const;
  // Where this is done.
  const c10::Stream& wayBack() const { return streams_.to_gpu; }

 private:
  const at::Tensor tensor_;
  const Streams streams_;
  c10::Event arrived_;
  at::Tensor host_;
};

}  // namespace ringreduce
