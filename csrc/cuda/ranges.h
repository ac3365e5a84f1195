// Names the calls of this rank's host in the timelines of profilers that know NVTX; nothing where
// its header is not there, and next to nothing where no profiler is.
#pragma once

#include "transport/shm/page.h"

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define RINGREDUCE_NVTX 1
#endif

namespace ringreduce::cuda {

// Putting a call into a stream.
class Range {
 public:
#ifdef RINGREDUCE_NVTX
  explicit Range(Kind kind) {
    // Its functions find out by themselves whether there is a profiler, but not in two threads at
    // once.
    static const bool ready = (nvtxInitialize(nullptr), true);
    if (ready) nvtxRangePushA(nameOf(kind));
  }
  ~Range() { nvtxRangePop(); }
#else
  explicit Range(Kind) {}
#endif
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  static constexpr const char* nameOf(Kind kind) {
    switch (kind) {
      case Kind::kAllReduce:
        return "ringreduce:all_reduce";
      case Kind::kReduceScatter:
        return "ringreduce:reduce_scatter";
      case Kind::kAllGather:
        return "ringreduce:all_gather";
      case Kind::kBroadcast:
        return "ringreduce:broadcast";
      default:
        return "ringreduce";
    }
  }
};

}  // namespace ringreduce::cuda
