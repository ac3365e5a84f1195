// The order of a communicator's calls, which share its slots and counters, whatever streams and
// CUDA graphs they are in.
//
// Outside of captures a call waits for an event of the call before it.  Inside a capture it waits
// for the call before it in the same capture.  A graph is replayed at any time and in any stream.
// From the first capture on, one event joins all calls: each call records it at its end and waits
// for it first.  In a graph, nodes do so; only the graph's first call waits.  A launch of a graph
// counts as the record of its events, as a call's does.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "cuda/cuda_stream.h"
#include "cuda/gpu_device.h"
#include "cuda/memory/device_memory.h"

namespace ringreduce::cuda {

class CallOrder {
 public:
  explicit CallOrder(int device) : device_(device) {}

  // Puts a wait for the call before it into the stream of a call.
  void follow(cudaStream_t stream) {
    const std::optional<CaptureId> capture = captureOf(stream);
    if (!capture) {
      if (always_)
        always_->holdBack(stream);
      else if (last_ && numberOf(stream) != last_stream_)
        last_->holdBack(stream);
      return;
    }
    if (const auto before = captured_.find(*capture); before != captured_.end())
      return before->second.last->holdBack(stream);
    if (!always_) begin();
    always_->holdBackReplays(stream);
  }

  // The event of a call's begin, behind what it waits for; null inside a capture.
  std::shared_ptr<Event> mark(cudaStream_t stream) {
    if (captureOf(stream)) return nullptr;
    auto event = events_.take();
    event->record(stream);
    return event;
  }

  // The call is in its stream.  Returns the event of its end; null inside a capture, where nothing
  // runs yet and no event tells when it will have.
  std::shared_ptr<Event> leave(cudaStream_t stream) {
    auto event = events_.take();
    const std::optional<CaptureId> capture = captureOf(stream);
    if (capture && always_) always_->recordReplays(stream);
    event->record(stream);
    if (capture) {
      captured_[*capture] = {std::move(event), ++uses_};
      if (captured_.size() > kMostCaptures)
        captured_.erase(std::ranges::min_element(
            captured_, {}, [](const auto& entry) { return entry.second.used; }));
      return nullptr;
    }
    if (always_) always_->record(stream);
    last_ = event;
    last_stream_ = numberOf(stream);
    return event;
  }

 private:
  // Captures end without notice: those without a call for longest are taken to have ended.
  static constexpr size_t kMostCaptures = 16;
  struct Captured {
    std::shared_ptr<Event> last;  // of its last call
    uint64_t used;                // grows with each call in a capture
  };

  // Makes the event of all calls, recorded behind those so far.
  void begin() {
    auto made = std::make_unique<Event>();
    if (last_) {
      const Stream behind(device_);
      last_->holdBack(behind.get());
      made->record(behind.get());
    }
    always_ = std::move(made);
  }

  const int device_;
  EventPool events_;
  std::shared_ptr<Event> last_;         // of the last call outside of captures, in its stream
  unsigned long long last_stream_ = 0;  // its number, which no other stream ever has
  std::unique_ptr<Event> always_;       // null: nothing was captured yet
  std::map<CaptureId, Captured> captured_;
  uint64_t uses_ = 0;
};

// The end of a call that the watchdog tracks before it is in the stream: the host may wait while it
// puts it there.
class CallEnd {
 public:
  explicit CallEnd(int device) : device_(device) {}

  // Null: there is nothing to wait for.
  void set(std::shared_ptr<Event> event) {
    const std::lock_guard lock(mutex_);
    event_ = std::move(event);
    is_set_ = true;
  }
  // The watchdog's thread calls it, and must not create a context on another device.
  bool isReached() {
    std::shared_ptr<Event> event;
    {
      const std::lock_guard lock(mutex_);
      if (!is_set_) return false;
      event = event_;
    }
    if (!event) return true;
    const OnDevice here(device_);
    return event->isReached();
  }

 private:
  const int device_;
  std::mutex mutex_;
  std::shared_ptr<Event> event_;
  bool is_set_ = false;
};

}  // namespace ringreduce::cuda
