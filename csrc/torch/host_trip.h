// Copies a GPU's tensor to the host's memory and back, for computations there.
//
// Copies run in streams beside the caller's, so neither its thread nor its stream waits for them.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

namespace ringreduce {

class HostTrip {
 public:
  // Of one device.  Two, since a copy to the host may wait for gradients that are computed, and
  // nothing that comes back is to stand behind it.
  struct Streams {
    c10::Stream to_host, to_gpu;
  };
  static Streams makeStreams(c10::Device device);

  // Starts to copy a tensor to pinned memory, behind what is now in its device's current stream.
  HostTrip(at::Tensor tensor, const Streams& streams);

  // To be looked at once it has arrived.
  const at::Tensor& host() const { return host_; }
  bool hasArrived() const { return arrived_.query(); }

  // Starts to copy what is there now over the tensor.  Once, after it has arrived.
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
