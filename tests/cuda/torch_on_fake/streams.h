// Streams of the fake that run: a thread takes what was put into a stream, in order, and streams
// wait for each other's events.  What a test wants to know of is whether somebody forgot to order
// two of them, so nothing else orders them, except the default stream and those that are not
// cudaStreamNonBlocking, as on a GPU.
//
// When a GPU is ruined, nothing more of what was put into its streams runs, and no wait waits on.
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

// A point in a stream of a GPU.
class Mark {
 public:
  explicit Mark(int ordinal) : ordinal_(ordinal) {}
  void reach();
  bool isReached();
  cudaError_t wait();     // returns what has ruined the GPU meanwhile, or success
  double milliseconds();  // when it was reached, by some clock

 private:
  const int ordinal_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  double at_ = 0;
};
using MarkPtr = std::shared_ptr<Mark>;

// What an event was last recorded as, outside of captures.  Graphs may keep it longer than the
// event.
struct EventState {
  const int ordinal;
  std::mutex mutex = {};
  MarkPtr mark = nullptr;  // null: not recorded yet
};

// A stream's tasks, in a thread that starts with the first one.
class Queue : public std::enable_shared_from_this<Queue> {
 public:
  explicit Queue(int ordinal) : ordinal(ordinal) {}
  void put(Task task);
  MarkPtr mark();  // behind all that was put so far
  bool isIdle();
  void close();  // ends it once all is done

  const int ordinal;

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
  const bool legacy;  // the default stream
  const unsigned long long number;
  const std::shared_ptr<fake::Queue> queue;
  // Guarded by captures().
  std::shared_ptr<fake::Capture> capture = nullptr;
  std::set<size_t> behind = {};  // the nodes that its next one follows
};

struct CUevent_st {
  const std::shared_ptr<fake::EventState> state;
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
// Puts it into the stream, or into its capture.  Returns why it cannot.
cudaError_t put(CUstream_st& stream, Task task);
// The same for kernels and copies, which touch GPU memory.
cudaError_t putWork(CUstream_st& stream, Task task);
// All tasks are done.  Returns why they never will.
cudaError_t finish(CUstream_st& stream);

// Of everything about captures.
std::mutex& captures();
// With captures() locked, these return what CUDA says of a use of the stream.  Wrong uses end the
// captures that they concern.
//
// Of work that is put into it: into its capture, if there is one.
cudaError_t useOf(CUstream_st& stream);
// Of a question about it, or a wait for it.
cudaError_t questionOf(CUstream_st& stream);
// Puts it into the stream's capture.
void capture(CUstream_st& stream, Node node);

bool isCapturing(CUstream_st& stream);

}  // namespace fake
