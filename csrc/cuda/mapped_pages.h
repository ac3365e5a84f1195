// Host memory that all ranks of a group map and all their GPUs reach, a piece for each rank: for
// flags that a host must be able to write without a call of CUDA.
//
// Kernels, stream waits and hosts see the same words.  What is in the pages outlives a rank that
// dies (group/exchange_fds.h).
#pragma once

#include <cstddef>
#include <vector>

#include "cuda/device_memory.h"
#include "group/exchange_fds.h"

namespace ringreduce::cuda {

class MappedPages {
 public:
  // Collective, with the same `bytes` on all ranks: that much for each, zeroed, rounded up to whole
  // pages.  `device` is this rank's.  Throws the same Error on all ranks.
  MappedPages(Group& group, int device, size_t bytes);

  size_t bytes() const { return pages_.bytes(); }
  std::byte* onHost(int rank) const { return pages_.at(rank); }
  // For this rank's GPU; another address than on the host on some machines.
  std::byte* onDevice(int rank) const { return mapped_[static_cast<size_t>(rank)]->data(); }

 private:
  HostPages pages_;
  std::vector<MemoryPtr> mapped_;  // by rank
};

}  // namespace ringreduce::cuda
