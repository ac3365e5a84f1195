// Events that tell when a stream has come to a point, kept to be used again: making one costs more
// than a small operation does.
//
// A thread queries them that knows nothing of captures in other threads.  While a stream is
// captured in the mode `global`, which is the usual one, such a question from any thread would be
// refused and end the capture, though it has nothing to do with it: so a thread that asks says that
// it knows.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <vector>

#include "base/fd.h"
#include "cuda/cuda_errors.h"
#include "transport/shm/page.h"

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define RINGREDUCE_NVTX 1
#endif

namespace ringreduce::cuda {

// Lets this thread make, for a scope, calls that a capture elsewhere need not mind.
class BesideCaptures {
 public:
  BesideCaptures() { exchange(); }
  ~BesideCaptures() { exchange(); }
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  void exchange() {
    checkQuietly(cudaThreadExchangeStreamCaptureMode(&mode_), "go on beside a capture", kNoDevice);
  }
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class Event {
 public:
  Event() { check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "make an event"); }
  ~Event() {
    if (forkGeneration() == generation_)
      checkQuietly(cudaEventDestroy(event_), "free an event", kNoDevice);
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(cudaStream_t stream) { check(cudaEventRecord(event_, stream), "record an event"); }
  // Whether the stream has come there.  Throws CudaError if it never will.
  bool isReached() const {
    const BesideCaptures beside;
    const cudaError_t status = cudaEventQuery(event_);
    if (status == cudaErrorNotReady) {
      (void)cudaGetLastError();  // the next call in this thread must not report it
      return false;
    }
    check(status, "ask whether a GPU operation has ended");
    return true;
  }
  // Lets `stream` go on only once it is reached.
  void holdBack(cudaStream_t stream) const {
    check(cudaStreamWaitEvent(stream, event_, 0), "order two streams");
  }

 private:
  const int generation_ = forkGeneration();
  cudaEvent_t event_ = nullptr;
};

class EventPool {
 public:
  std::shared_ptr<Event> take() {
    std::unique_ptr<Event> event;
    {
      const std::lock_guard lock(free_->mutex);
      if (!free_->events.empty()) {
        event = std::move(free_->events.back());
        free_->events.pop_back();
      }
    }
    if (!event) event = std::make_unique<Event>();
    // The last to hold it brings it back, also when that outlives the pool.
    return {event.release(), [free = free_](Event* used) {
              const std::lock_guard guard(free->mutex);
              free->events.emplace_back(used);
            }};
  }

 private:
  struct Free {
    std::mutex mutex;
    std::vector<std::unique_ptr<Event>> events;
  };
  std::shared_ptr<Free> free_ = std::make_shared<Free>();
};

// ----
//
// Names the calls of this rank's host in the timelines of profilers that know NVTX; nothing where
// its header is not there, and next to nothing where no profiler is.

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
