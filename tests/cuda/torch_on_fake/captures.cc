// Captures of streams, and graphs.  A replay keeps the order that streams and events gave to the
// nodes, and no other: nodes without such an order run at the same time, and start in a random one.
// FAKE_SEED is its seed.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <random>
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

// Whether the stream is behind all nodes of its capture.
bool isBehindAll(const CUstream_st& stream) {
  const std::vector<Node>& nodes = stream.capture->nodes;
  std::set<size_t> seen;
  std::vector<size_t> left(stream.behind.begin(), stream.behind.end());
  while (!left.empty()) {
    const size_t n = left.back();
    left.pop_back();
    if (!seen.insert(n).second) continue;
    left.insert(left.end(), nodes[n].behind.begin(), nodes[n].behind.end());
  }
  return seen.size() == nodes.size();
}

unsigned nextSeed() {
  static std::atomic<unsigned> last = [] {
    const char* seed = std::getenv("FAKE_SEED");
    return seed ? static_cast<unsigned>(std::atoi(seed)) : 0;
  }();
  return ++last;
}

// One replay of a graph.
class Replay {
 public:
  // Records of events count from the launch on, and waits are for the records before them.
  explicit Replay(const std::vector<Node>& nodes) : random_(nextSeed()) {
    for (const Node& node : nodes) {
      steps_.push_back({node.task, node.behind.size(), {}});
      for (size_t before : node.behind) steps_[before].next.push_back(steps_.size() - 1);
      if (node.behind.empty()) ready_.push_back(steps_.size() - 1);
      if (!node.event) continue;
      const std::lock_guard lock(node.event->mutex);
      if (node.records) {
        auto mark = node.event->mark = std::make_shared<Mark>(node.event->ordinal);
        steps_.back().task = [mark] { mark->reach(); };
      } else if (node.event->mark) {
        steps_.back().task = [mark = node.event->mark] { mark->wait(); };
      } else {
        steps_.back().task = [] {};
      }
    }
  }

  void run() {
    std::vector<std::thread> threads;
    std::unique_lock lock(mutex_);
    for (size_t left = steps_.size(); left > 0; --left) {
      changed_.wait(lock, [&] { return !ready_.empty(); });
      std::swap(ready_.back(), ready_[random_() % ready_.size()]);
      const size_t n = ready_.back();
      ready_.pop_back();
      if (ready_.empty() && running_ == 0) {
        lock.unlock();
        steps_[n].task();
        lock.lock();
        end(n);
        continue;
      }
      ++running_;
      const std::chrono::microseconds late(random_() % 2 ? random_() % 1000 : 0);
      threads.emplace_back([this, n, late] {
        std::this_thread::sleep_for(late);
        steps_[n].task();
        const std::lock_guard done(mutex_);
        --running_;
        end(n);
        changed_.notify_one();
      });
    }
    lock.unlock();
    for (std::thread& thread : threads) thread.join();
  }

 private:
  struct Step {
    Task task;
    size_t waits_for;
    std::vector<size_t> next;
  };
  void end(size_t n) {
    for (size_t next : steps_[n].next)
      if (--steps_[next].waits_for == 0) ready_.push_back(next);
  }

  std::mt19937 random_;
  std::vector<Step> steps_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<size_t> ready_;
  int running_ = 0;
};

}  // namespace

std::mutex& captures() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

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

// Work in the default stream would follow that in streams which are not cudaStreamNonBlocking.
cudaError_t useOf(CUstream_st& stream) {
  if (stream.capture) return stream.capture->broken;
  cudaError_t error = cudaSuccess;
  for (const auto& capture : underWay())
    for (const CUstream_st* other : capture->streams)
      if (stream.legacy && other->ordinal == stream.ordinal &&
          !(other->flags & cudaStreamNonBlocking)) {
        capture->broken = cudaErrorStreamCaptureInvalidated;
        error = cudaErrorStreamCaptureImplicit;
      }
  return error;
}

cudaError_t questionOf(CUstream_st& stream) {
  if (!stream.capture) return useOf(stream);
  stream.capture->broken = cudaErrorStreamCaptureInvalidated;
  return cudaErrorStreamCaptureUnsupported;
}

void capture(CUstream_st& stream, Node node) {
  node.behind = std::exchange(stream.behind, {stream.capture->nodes.size()});
  stream.capture->nodes.push_back(std::move(node));
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
  if (const auto e = fate(stream.ordinal)) return said(e);
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
  if (const auto e = fate(stream.ordinal)) return said(e);
  const std::lock_guard lock(captures());
  if (handle != &stream || stream.capture) return said(cudaErrorStreamCaptureUnsupported);
  stream.capture = std::make_shared<Capture>(
      Capture{next_number++, of, std::this_thread::get_id(), &stream, {&stream}});
  stream.behind = {};
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
  if (capture->mode != cudaStreamCaptureModeRelaxed &&
      capture->thread != std::this_thread::get_id())
    return said(cudaErrorStreamCaptureWrongThread);
  cudaError_t error = capture->broken;
  if (!error && !isBehindAll(stream)) error = cudaErrorStreamCaptureUnjoined;
  for (CUstream_st* joined : capture->streams) {
    joined->capture = nullptr;
    joined->behind = {};
  }
  std::erase(underWay(), capture);
  if (error) return said(error, "the capture has failed");
  *graph = new CUgraph_st{capture->nodes};
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
  CUstream_st& stream = streamOf(handle);
  if (const auto e = fate(stream.ordinal)) return said(e);
  MarkPtr mark;
  {
    const std::lock_guard capturing(captures());
    if (const auto e = useOf(stream)) return said(e);
    if (flags == cudaEventWaitExternal) {
      if (!stream.capture)
        return said(cudaErrorIllegalState, "an external wait outside of a capture");
      capture(stream, {.task = nullptr, .event = event->state});
      return cudaSuccess;
    }
    if (event->capture) {
      if (std::ranges::count(underWay(), event->capture) == 0)
        return said(cudaErrorCapturedEvent, "the event is of a capture that has ended");
      if (!stream.capture) {
        stream.capture = event->capture;
        stream.capture->streams.push_back(&stream);
      }
      if (stream.capture != event->capture) return said(cudaErrorStreamCaptureMerge);
      stream.behind.insert(event->behind.begin(), event->behind.end());
      return cudaSuccess;
    }
    const std::lock_guard lock(event->state->mutex);
    mark = event->state->mark;
    if (!mark) return cudaSuccess;
    if (stream.capture) {
      stream.capture->broken = cudaErrorStreamCaptureInvalidated;
      return said(cudaErrorStreamCaptureIsolation, "the event is of no captured stream");
    }
  }
  return said(put(stream, [mark] { mark->wait(); }));
}

// ---- graphs

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  if (nodes) return said(cudaErrorNotSupported, "the fake's graphs have no nodes to show");
  *count = graph->nodes.size();
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph,
                                          unsigned long long) {
  if (const auto e = fate()) return said(e);
  if (const auto e = besideCaptures()) return said(e);
  *made = new CUgraphExec_st{graph->nodes};
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  if (isCapturing(streamOf(stream)))
    return said(cudaErrorNotSupported, "the fake's graphs have no graphs in them");
  return said(
      put(streamOf(stream), [replay = std::make_shared<Replay>(graph->nodes)] { replay->run(); }));
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
