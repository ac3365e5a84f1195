// Streams of the fake that run: a thread takes what was put into a stream, in order, and streams
// wait for each other's events.  What a test wants to know of is whether somebody forgot to order
// two of them, so nothing else orders them: not the default stream either, which on a GPU waits for
// some.
#pragma once

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace fake {

using Task = std::function<void()>;

// A point in a stream.
class Mark {
 public:
  void reach();
  bool isReached();
  void wait();
  double milliseconds();  // when it was reached, by some clock

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  double at_ = 0;
};
using MarkPtr = std::shared_ptr<Mark>;

// What an event was last recorded as, outside of captures.  Graphs may keep it longer than the
// event.
struct EventState {
  std::mutex mutex;
  MarkPtr mark = nullptr;  // null: not recorded yet
};

// A stream's tasks, in a thread that starts with the first one.
class Queue : public std::enable_shared_from_this<Queue> {
 public:
  explicit Queue(int gpu) : gpu(gpu) {}
  void put(Task task);
  MarkPtr mark();  // behind all that was put so far
  bool isIdle();
  void close();  // ends it once all is done

  const int gpu;

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool running_ = false, busy_ = false, closed_ = false;
};

// What a graph does at once, behind other nodes of it: a task, or a record of an event or a wait
// for one outside of the graph.
struct Node {
  Task task;
  std::shared_ptr<EventState> event = nullptr;
  bool records = false;
  std::set<size_t> behind = {};
};

struct Capture {
  unsigned long long number;
  cudaStreamCaptureMode mode;
  std::thread::id thread;
  CUstream_st* origin;
  std::vector<CUstream_st*> streams = {};
  std::vector<Node> nodes = {};
  cudaError_t broken = cudaSuccess;
};

}  // namespace fake

struct CUstream_st {
  const int ordinal, priority;
  const unsigned flags;
  const unsigned long long number;
  const std::shared_ptr<fake::Queue> queue;
  // Guarded by captures().
  std::shared_ptr<fake::Capture> capture = nullptr;
  std::set<size_t> behind = {};  // the nodes that its next one follows
};

struct CUevent_st {
  const std::shared_ptr<fake::EventState> state = std::make_shared<fake::EventState>();
  // Guarded by captures().  Of its last record, if that was captured.
  std::shared_ptr<fake::Capture> capture = nullptr;
  std::set<size_t> behind = {};
};

struct CUgraph_st {
  std::vector<fake::Node> nodes;
};
struct CUgraphExec_st {
  std::vector<fake::Node> nodes;
};

namespace fake {

// The stream that a handle means; null is the current GPU's default stream.
CUstream_st& streamOf(cudaStream_t stream);
// Puts it into the stream, or into its capture.
void put(CUstream_st& stream, Task task);
// Puts it into the stream's capture.  With captures() locked.
void capture(CUstream_st& stream, Node node);
// All tasks are done.
void finish(CUstream_st& stream);

// Of everything about captures.
std::mutex& captures();
// CUDA's answer to calls that are not allowed during a capture; they end the capture.
cudaError_t besideCaptures();
bool isCapturing(CUstream_st& stream);

}  // namespace fake
