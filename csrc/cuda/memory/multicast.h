// Memory of several GPUs that an NVSwitch adds and stores to as if it were one: a multicast object,
// to which each GPU binds memory of its own.
//
// The order of the steps follows the driver's rules.  All GPUs are added before any GPU binds
// memory: the call would wait for a missing GPU without end.  All GPUs have bound memory before any
// rank uses the object.  An object that goes to other processes takes only memory that could go
// there too. What is bound, offsets and addresses are multiples of the object's granularity.
#pragma once

#include <cstddef>
#include <memory>

#include "group/group.h"

namespace ringreduce::cuda {

class MulticastWindow {
 public:
  // Collective: all ranks, each on a GPU of its own, ask for the same `bytes`, which are zeroed.
  // Throws the same Error on all ranks, which names the first that cannot have it.
  MulticastWindow(Group& group, int device, size_t bytes);
  // Gives it back.  No rank's kernels may use it any more.
  ~MulticastWindow();
  MulticastWindow(const MulticastWindow&) = delete;
  MulticastWindow& operator=(const MulticastWindow&) = delete;

  std::byte* own() const;       // this rank's memory
  std::byte* everyone() const;  // the same place in all ranks' memory, for multimem instructions
  size_t bytes() const { return bytes_; }

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
  size_t bytes_;
};

}  // namespace ringreduce::cuda
