// Streams and events.
#include "streams.h"

#include <cuda.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <set>

#include "../fake_world.h"

namespace fake {
namespace {

// Of this process.  Never destroyed: threads use them until the process has ended.
struct All {
  std::mutex mutex;
  std::set<CUstream_st*> streams;
  std::map<int, CUstream_st*> defaults;  // by ordinal
  unsigned long long next = 1;
};
All& all() {
  static All* those = new All;
  return *those;
}

CUstream_st* make(int ordinal, int priority, unsigned flags) {
  return new CUstream_st{ordinal, priority, flags, all().next++,
                         std::make_shared<Queue>(gpuOf(ordinal))};
}

// Between two looks at a word that another process sets.
void pause() {
  std::this_thread::sleep_for(std::chrono::microseconds(20));
}

}  // namespace

// ---- marks

void Mark::reach() {
  const std::lock_guard lock(mutex_);
  reached_ = true;
  at_ =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch())
          .count();
  changed_.notify_all();
}
bool Mark::isReached() {
  const std::lock_guard lock(mutex_);
  return reached_;
}
void Mark::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return reached_; });
}
double Mark::milliseconds() {
  const std::lock_guard lock(mutex_);
  return at_;
}

// ---- queues

void Queue::put(Task task) {
  const std::lock_guard lock(mutex_);
  tasks_.push_back(std::move(task));
  changed_.notify_one();
  if (running_) return;
  running_ = true;
  std::thread([self = shared_from_this()] { self->run(); }).detach();
}

MarkPtr Queue::mark() {
  auto mark = std::make_shared<Mark>();
  put([mark] { mark->reach(); });
  return mark;
}

bool Queue::isIdle() {
  const std::lock_guard lock(mutex_);
  return tasks_.empty() && !busy_;
}

void Queue::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_one();
}

void Queue::run() {
  pthread_setname_np(pthread_self(), "fake stream");
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !tasks_.empty() || closed_; });
    if (tasks_.empty()) return;
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    busy_ = true;
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
    busy_ = false;
  }
}

// ---- streams

CUstream_st& streamOf(cudaStream_t stream) {
  if (stream && stream != cudaStreamLegacy && stream != cudaStreamPerThread) return *stream;
  const std::lock_guard lock(all().mutex);
  CUstream_st*& found = all().defaults[currentOrdinal()];
  if (!found) all().streams.insert(found = make(currentOrdinal(), 0, cudaStreamDefault));
  return *found;
}

void put(CUstream_st& stream, Task task) {
  {
    const std::lock_guard lock(captures());
    if (stream.capture) return capture(stream, {std::move(task)});
  }
  stream.queue->put(std::move(task));
}

void finish(CUstream_st& stream) {
  if (!stream.queue->isIdle()) stream.queue->mark()->wait();
}

void finish(int gpu) {
  std::vector<std::shared_ptr<Queue>> queues;
  {
    const std::lock_guard lock(all().mutex);
    for (CUstream_st* stream : all().streams)
      if (stream->queue->gpu == gpu) queues.push_back(stream->queue);
  }
  for (const auto& queue : queues)
    if (!queue->isIdle()) queue->mark()->wait();
}

CUresult streamWaitValue32(CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned flags) {
  if (flags != CU_STREAM_WAIT_VALUE_GEQ) return CUDA_ERROR_NOT_SUPPORTED;
  auto* word = reinterpret_cast<uint32_t*>(at);
  put(streamOf(stream), [word, value] {
    while (static_cast<int32_t>(std::atomic_ref(*word).load(std::memory_order_acquire) - value) < 0)
      pause();
  });
  return CUDA_SUCCESS;
}

CUresult streamWriteValue32(CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned) {
  auto* word = reinterpret_cast<uint32_t*>(at);
  put(streamOf(stream),
      [word, value] { std::atomic_ref(*word).store(value, std::memory_order_release); });
  return CUDA_SUCCESS;
}

}  // namespace fake

using namespace fake;

namespace {

bool isOfCapture(cudaEvent_t event) {
  const std::lock_guard lock(captures());
  return event->capture != nullptr;
}
MarkPtr markOf(cudaEvent_t event) {
  const std::lock_guard lock(event->state->mutex);
  return event->state->mark;
}

}  // namespace

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  if (const auto e = fate()) return said(e);
  const std::lock_guard lock(all().mutex);
  all().streams.insert(*stream = make(currentOrdinal(), priority, flags));
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const std::lock_guard lock(all().mutex);
  if (all().streams.erase(stream) == 0) undefined("destroyed a stream that is not there");
  stream->queue->close();
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (const auto e = besideCaptures()) return said(e);
  finish(streamOf(stream));
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (const auto e = besideCaptures()) return said(e);
  return streamOf(stream).queue->isIdle() ? cudaSuccess : said(cudaErrorNotReady);
}
cudaError_t cudaDeviceSynchronize() {
  if (const auto e = besideCaptures()) return said(e);
  finish(gpuOf(currentOrdinal()));
  return cudaSuccess;
}
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* number) {
  *number = streamOf(stream).number;
  return cudaSuccess;
}
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = streamOf(stream).priority;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  *lowest = 0, *highest = -5;
  return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  put(streamOf(stream), [function, data] { function(data); });
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data,
                                  unsigned) {
  put(streamOf(stream), [=] { function(stream, cudaSuccess, data); });
  return cudaSuccess;
}

// ---- events

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  if (const auto e = fate()) return said(e);
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  return cudaEventRecordWithFlags(event, handle, cudaEventRecordDefault);
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned flags) {
  CUstream_st& stream = streamOf(handle);
  const std::lock_guard capturing(captures());
  if (flags == cudaEventRecordExternal) {
    if (!stream.capture)
      return said(cudaErrorIllegalState, "an external record outside of a capture");
    capture(stream, {.task = nullptr, .event = event->state, .records = true});
    return cudaSuccess;
  }
  event->capture = stream.capture;
  event->behind = stream.behind;
  const std::lock_guard lock(event->state->mutex);
  event->state->mark = event->capture ? nullptr : stream.queue->mark();
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (const auto e = besideCaptures()) return said(e);
  if (isOfCapture(event)) return said(cudaErrorCapturedEvent, "the event is of a capture");
  const MarkPtr mark = markOf(event);
  return !mark || mark->isReached() ? cudaSuccess : said(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (const auto e = besideCaptures()) return said(e);
  if (isOfCapture(event)) return said(cudaErrorCapturedEvent, "the event is of a capture");
  if (const MarkPtr mark = markOf(event)) mark->wait();
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  const MarkPtr begin = markOf(from), end = markOf(to);
  if (!begin || !end) return said(cudaErrorInvalidResourceHandle);
  if (!begin->isReached() || !end->isReached()) return said(cudaErrorNotReady);
  *milliseconds = static_cast<float>(end->milliseconds() - begin->milliseconds());
  return cudaSuccess;
}

}  // extern "C"
