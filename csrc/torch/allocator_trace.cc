// The tracker of torch's allocator, and what is mapped when it begins.
//
// torch calls a tracker under the lock of its allocator, and tells of an unmapped piece after the
// call of CUDA, before it maps another there.
#include "torch/allocator_trace.h"

#ifdef RINGREDUCE_CUDA
#include <c10/cuda/CUDACachingAllocator.h>

#include <cstdint>
#include <vector>

#include "base/error.h"
#include "cuda/memory/expandable_memory.h"

namespace ringreduce {

namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

void noteEntry(const caching::TraceEntry& entry) {
  using Action = caching::TraceEntry::Action;
  if (entry.action_ == Action::SEGMENT_MAP)
    cuda::noteMapped(entry.device_, entry.addr_, entry.size_);
  else if (entry.action_ == Action::SEGMENT_UNMAP)
    cuda::noteUnmapped(entry.addr_, entry.size_);
}

bool followFromNow() {
  if (caching::name() != "native") {
    log("RINGREDUCE_CUDA_MAP=vmm does nothing with torch's allocator " + caching::name() +
        ": only the native one has expandable segments");
    return true;
  }
  // Once, also where the rest throws and is tried again: it cannot be detached.
  static const bool attached = (caching::attachAllocatorTraceTracker(noteEntry), true);
  (void)attached;
  std::vector<cuda::Extent> mapped;
  uint64_t notes = 0;
  do {
    notes = cuda::notesSoFar();
    mapped.clear();
    for (const auto& segment :
         caching::snapshot(/*mempool_id=*/{0, 0}, /*include_traces=*/false).segments)
      if (segment.is_expandable)
        mapped.push_back({.begin = segment.address,
                          .end = segment.address + segment.total_size,
                          .device = segment.device});
  } while (!cuda::noteAllMapped(mapped, notes));
  return true;
}

}  // namespace

void followAllocator() {
  static const bool begun = followFromNow();
  (void)begun;
}

}  // namespace ringreduce
#endif
