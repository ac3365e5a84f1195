// CUDA streams: launching kernels, events, and the names of calls in profilers.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>

#include "base/fd.h"
#include "base/op_signature.h"
#include "base/spares.h"
#include "cuda/cuda_errors.h"
#include "cuda/gpu_device.h"
#include "cuda/kernels/gpu_tuning.h"

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define RINGREDUCE_NVTX 1
#endif

namespace ringreduce::cuda {

// Launches `blocks` blocks of a kernel that takes one struct.
inline void launch(const void* kernel, int blocks, const void* arguments, bool cooperative,
                   cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = cooperative;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  void* all[] = {const_cast<void*>(arguments)};
  check(cudaLaunchKernelExC(&config, kernel, all), "launch a kernel");
}

// Identifies a stream.  Its address does not: a later stream may have the same one, and the default
// streams of all threads share one.
inline unsigned long long numberOf(cudaStream_t stream) {
  unsigned long long number = 0;
  check(cudaStreamGetId(stream, &number), "ask which stream it is");
  return number;
}

// The number of the capture that a stream is in, which no other capture ever has.
using CaptureId = unsigned long long;
inline std::optional<CaptureId> captureOf(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  CaptureId capture = 0;
  check(cudaStreamGetCaptureInfo(stream, &status, &capture),
        "ask whether a stream is being captured");
  if (status == cudaStreamCaptureStatusNone) return std::nullopt;
  return capture;
}

// Tells when a stream has come to a point.
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
  // Throws CudaError if the stream will never come there.
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
  // Makes `stream` wait for it.
  void holdBack(cudaStream_t stream) const {
    check(cudaStreamWaitEvent(stream, event_, 0), "order two streams");
  }
  // The same by nodes of the graph that `stream` is captured into, at each replay.
  void recordReplays(cudaStream_t stream) {
    check(cudaEventRecordWithFlags(event_, stream, cudaEventRecordExternal),
          "record an event in a CUDA graph");
  }
  void holdBackReplays(cudaStream_t stream) const {
    check(cudaStreamWaitEvent(stream, event_, cudaEventWaitExternal), "hold back a CUDA graph");
  }

 private:
  const int generation_ = forkGeneration();
  cudaEvent_t event_ = nullptr;
};

using EventPool = Spares<Event>;

// Names a call in the timelines of profilers that know NVTX.  Does nothing without NVTX's header,
// and costs next to nothing without a profiler.
class Range {
 public:
#ifdef RINGREDUCE_NVTX
  explicit Range(Kind kind) {
    // NVTX initialises itself, but not safely from two threads at once.
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
