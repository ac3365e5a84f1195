// Captures of streams, and graphs: a graph replays all that was captured one after the other, in
// the order in which it was put there.
#include <algorithm>
#include <utility>

#include "../fake_world.h"
#include "streams.h"

namespace fake {
namespace {

thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;

// All that have begun and not ended; guarded by captures().
std::vector<std::shared_ptr<Capture>>& underWay() {
  static auto* those = new std::vector<std::shared_ptr<Capture>>;
  return *those;
}
unsigned long long next_number = 1;

void merge(Known& into, const Known& from) {
  for (const auto& [stream, step] : from) into[stream] = std::max(into[stream], step);
}

}  // namespace

std::mutex& captures() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

// cudaThreadExchangeStreamCaptureMode's documentation has these rules.
cudaError_t besideCaptures() {
  const std::lock_guard lock(captures());
  if (mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (const auto& capture : underWay()) {
    const bool own = capture->thread == std::this_thread::get_id();
    const bool minds =
        own ? capture->mode != cudaStreamCaptureModeRelaxed
            : capture->mode == cudaStreamCaptureModeGlobal && mode == cudaStreamCaptureModeGlobal;
    if (!minds) continue;
    capture->broken = cudaErrorStreamCaptureInvalidated;
    return cudaErrorStreamCaptureUnsupported;
  }
  return cudaSuccess;
}

bool isCapturing(CUstream_st& stream) {
  const std::lock_guard lock(captures());
  return stream.capture != nullptr;
}

}  // namespace fake

using namespace fake;

extern "C" {

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* other) {
  std::swap(*other, mode);
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status,
                                     unsigned long long* number, cudaGraph_t* graph,
                                     const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
                                     size_t* count) {
  if (graph || nodes || edges || count)
    return said(cudaErrorNotSupported, "the fake shows no graphs while they are captured");
  CUstream_st& stream = streamOf(handle);
  const std::lock_guard lock(captures());
  *status = cudaStreamCaptureStatusNone;
  if (!stream.capture) return cudaSuccess;
  *status =
      stream.capture->broken ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
  if (number) *number = stream.capture->number;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(stream, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}
cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode of) {
  CUstream_st& stream = streamOf(handle);
  const std::lock_guard lock(captures());
  if (handle != &stream || stream.capture) return said(cudaErrorStreamCaptureUnsupported);
  stream.capture = std::make_shared<Capture>(
      Capture{next_number++, of, std::this_thread::get_id(), &stream, {&stream}});
  stream.known = {};
  underWay().push_back(stream.capture);
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  CUstream_st& stream = streamOf(handle);
  const std::lock_guard lock(captures());
  const auto capture = stream.capture;
  *graph = nullptr;
  if (!capture) return said(cudaErrorIllegalState, "the stream is not being captured");
  if (capture->origin != &stream) return said(cudaErrorStreamCaptureUnmatched);
  cudaError_t error = capture->broken;
  for (CUstream_st* joined : capture->streams) {
    if (stream.known[joined->number] < joined->known[joined->number] && !error)
      error = cudaErrorStreamCaptureUnjoined;
    joined->capture = nullptr;
  }
  for (CUstream_st* joined : capture->streams) joined->known = {};
  std::erase(underWay(), capture);
  if (error) return said(error, "the capture has failed");
  *graph = new CUgraph_st{capture->tasks};
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  CUstream_st& stream = streamOf(handle);
  const std::lock_guard lock(event->mutex);
  {
    const std::lock_guard capturing(captures());
    if (event->capture) {
      if (!stream.capture) {
        stream.capture = event->capture;
        stream.capture->streams.push_back(&stream);
      }
      if (stream.capture != event->capture) return said(cudaErrorStreamCaptureMerge);
      merge(stream.known, event->known);
      return cudaSuccess;
    }
    if (!event->mark) return cudaSuccess;
    if (stream.capture) {
      stream.capture->broken = cudaErrorStreamCaptureInvalidated;
      return said(cudaErrorStreamCaptureIsolation, "the event is of no captured stream");
    }
  }
  put(stream, [mark = event->mark] { mark->wait(); });
  return cudaSuccess;
}

// ---- graphs

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  if (nodes) return said(cudaErrorNotSupported, "the fake's graphs have no nodes to show");
  *count = graph->tasks.size();
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph,
                                          unsigned long long) {
  *made = new CUgraphExec_st{graph->tasks};
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  put(streamOf(stream), [tasks = graph->tasks] {
    for (const Task& task : tasks) task();
  });
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete graph;
  return cudaSuccess;
}

}  // extern "C"
