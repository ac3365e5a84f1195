// Streams and events.
#include "streams.h"

#include <cuda.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <set>

#include "../fake_world.h"
#include "kernels.h"

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

std::atomic<int> events_made = 0;

CUstream_st* make(int ordinal, int priority, unsigned flags, bool legacy = false) {
  return new CUstream_st{ordinal, priority,     flags,
                         legacy,  all().next++, std::make_shared<Queue>(ordinal)};
}

using QueuePtr = std::shared_ptr<Queue>;

bool isBlocking(const CUstream_st& stream) {
  return !(stream.flags & cudaStreamNonBlocking);
}

// Of the streams that CUDA orders with this one by itself: the default stream with those that are
// not cudaStreamNonBlocking.
std::vector<QueuePtr> queuesBefore(const CUstream_st& stream) {
  std::vector<QueuePtr> queues;
  if (!isBlocking(stream)) return queues;
  const std::lock_guard lock(all().mutex);
  for (const CUstream_st* other : all().streams)
    if (other->ordinal == stream.ordinal && other != &stream && isBlocking(*other) &&
        (stream.legacy || other->legacy) && !other->queue->isIdle())
      queues.push_back(other->queue);
  return queues;
}

// Puts the waits into the stream that CUDA does by itself.
void follow(const CUstream_st& stream) {
  for (const QueuePtr& before : queuesBefore(stream))
    stream.queue->put([mark = before->mark()] { mark->wait(); });
}

cudaError_t finish(const QueuePtr& queue) {
  if (queue->isIdle()) return ruinOf(queue->ordinal);
  return queue->mark()->wait();
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
cudaError_t Mark::wait() {
  constexpr std::chrono::milliseconds kLook(10);
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kLook, [&] { return reached_; }))
    if (const auto ruined = ruinOf(ordinal_)) return ruined;
  return ruinOf(ordinal_);
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
  auto mark = std::make_shared<Mark>(ordinal);
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
    if (!ruinOf(ordinal)) task();
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
  if (!found) all().streams.insert(found = make(currentOrdinal(), 0, cudaStreamDefault, true));
  return *found;
}

cudaError_t put(CUstream_st& stream, Task task) {
  if (const auto e = fate(stream.ordinal)) return e;
  {
    const std::lock_guard lock(captures());
    if (const auto e = useOf(stream)) return e;
    if (stream.capture) {
      capture(stream, {std::move(task)});
      return cudaSuccess;
    }
  }
  follow(stream);
  stream.queue->put(std::move(task));
  return cudaSuccess;
}

cudaError_t putWork(CUstream_st& stream, Task task) {
  return put(stream, [task = std::move(task)] {
    const Working working;
    task();
  });
}

cudaError_t finish(CUstream_st& stream) {
  follow(stream);
  return finish(stream.queue);
}

void finish(int gpu) {
  std::vector<QueuePtr> queues;
  {
    const std::lock_guard lock(all().mutex);
    for (CUstream_st* stream : all().streams)
      if (gpuOf(stream->ordinal) == gpu) queues.push_back(stream->queue);
  }
  for (const QueuePtr& queue : queues) finish(queue);
}

CUresult streamWaitValue32(CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned flags) {
  if (flags != CU_STREAM_WAIT_VALUE_GEQ) return CUDA_ERROR_NOT_SUPPORTED;
  auto* word = reinterpret_cast<uint32_t*>(at);
  CUstream_st& in = streamOf(stream);
  return asDriver(put(in, [word, value, ordinal = in.ordinal] {
    while (static_cast<int32_t>(std::atomic_ref(*word).load(std::memory_order_acquire) - value) <
               0 &&
           !ruinOf(ordinal))
      pause();
  }));
}

CUresult streamWriteValue32(CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned) {
  auto* word = reinterpret_cast<uint32_t*>(at);
  return asDriver(put(streamOf(stream), [word, value] {
    std::atomic_ref(*word).store(value, std::memory_order_release);
  }));
}

}  // namespace fake

using namespace fake;

namespace {

// What CUDA says of a question about an event of a capture, which ends that.
cudaError_t questionOf(cudaEvent_t event) {
  const std::lock_guard lock(captures());
  if (!event->capture) return cudaSuccess;
  event->capture->broken = cudaErrorStreamCaptureInvalidated;
  return cudaErrorCapturedEvent;
}
cudaError_t questionOf(cudaStream_t handle) {
  CUstream_st& stream = streamOf(handle);
  const std::lock_guard lock(captures());
  return fake::questionOf(stream);
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
  const auto e = fateOfReturn(stream->ordinal);
  stream->queue->close();
  delete stream;
  return said(e);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (const auto e = questionOf(stream)) return said(e);
  if (const auto e = besideCaptures()) return said(e);
  return said(finish(streamOf(stream)));
}
cudaError_t cudaStreamQuery(cudaStream_t handle) {
  if (const auto e = questionOf(handle)) return said(e);
  if (const auto e = besideCaptures()) return said(e);
  CUstream_st& stream = streamOf(handle);
  if (const auto e = fate(stream.ordinal)) return said(e);
  return stream.queue->isIdle() && queuesBefore(stream).empty() ? cudaSuccess
                                                                : said(cudaErrorNotReady);
}
cudaError_t cudaDeviceSynchronize() {
  {
    const std::lock_guard capturing(captures());
    const std::lock_guard lock(all().mutex);
    cudaError_t error = cudaSuccess;
    for (CUstream_st* stream : all().streams)
      if (stream->ordinal == currentOrdinal())
        if (const auto e = questionOf(*stream)) error = e;
    if (error) return said(error);
  }
  if (const auto e = besideCaptures()) return said(e);
  finish(gpuOf(currentOrdinal()));
  return said(fate());
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
  return said(put(streamOf(stream), [function, data] { function(data); }));
}
int fakeLaunchWork(cudaStream_t stream, void (*function)(void*), void* data) {
  return said(putWork(streamOf(stream), [function, data] { function(data); }));
}
int fakeFault(cudaStream_t handle, int error) {
  CUstream_st& stream = streamOf(handle);
  return said(put(stream, [ordinal = stream.ordinal, error] {
    ruin(ordinal, static_cast<cudaError_t>(error));
  }));
}
int fakeRuinOf(int ordinal) {
  return ruinOf(ordinal);
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data,
                                  unsigned) {
  return said(put(streamOf(stream), [=] { function(stream, cudaSuccess, data); }));
}

// ---- events

int fakeEventsMade() {
  return events_made;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  if (const auto e = fate()) return said(e);
  ++events_made;
  *event = new CUevent_st{.state = std::make_shared<EventState>(currentOrdinal())};
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const auto e = fateOfReturn(event->state->ordinal);
  delete event;
  return said(e);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  return cudaEventRecordWithFlags(event, handle, cudaEventRecordDefault);
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned flags) {
  CUstream_st& stream = streamOf(handle);
  if (const auto e = fate(stream.ordinal)) return said(e);
  const std::lock_guard capturing(captures());
  if (const auto e = useOf(stream)) return said(e);
  if (flags == cudaEventRecordExternal) {
    if (!stream.capture)
      return said(cudaErrorIllegalState, "an external record outside of a capture");
    capture(stream, {.task = nullptr, .event = event->state, .records = true});
    return cudaSuccess;
  }
  event->capture = stream.capture;
  event->behind = stream.behind;
  if (!event->capture) follow(stream);
  const std::lock_guard lock(event->state->mutex);
  event->state->mark = event->capture ? nullptr : stream.queue->mark();
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (const auto e = questionOf(event)) return said(e, "the event is of a capture");
  if (const auto e = besideCaptures()) return said(e);
  if (const auto e = fate(event->state->ordinal)) return said(e);
  const MarkPtr mark = markOf(event);
  return !mark || mark->isReached() ? cudaSuccess : said(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (const auto e = questionOf(event)) return said(e, "the event is of a capture");
  if (const auto e = besideCaptures()) return said(e);
  if (const auto e = fate(event->state->ordinal)) return said(e);
  const MarkPtr mark = markOf(event);
  return mark ? said(mark->wait()) : cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  if (const auto e = questionOf(from)) return said(e, "the event is of a capture");
  if (const auto e = questionOf(to)) return said(e, "the event is of a capture");
  if (const auto e = fate(from->state->ordinal)) return said(e);
  const MarkPtr begin = markOf(from), end = markOf(to);
  if (!begin || !end) return said(cudaErrorInvalidResourceHandle);
  if (!begin->isReached() || !end->isReached()) return said(cudaErrorNotReady);
  *milliseconds = static_cast<float>(end->milliseconds() - begin->milliseconds());
  return cudaSuccess;
}

}  // extern "C"
