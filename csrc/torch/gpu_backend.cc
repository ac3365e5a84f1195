// Ordering calls behind the caller's stream and putting them into one; communicators, and the
// backend's life. The calls themselves are in gpu_calls.cc.
//
// An asynchronous call runs in a stream of the backend's own.  Its Work keeps its tensors until the
// caller's stream waits for it, so that torch's allocator does not give their memory away too
// early, and does so at once afterwards.  A blocking call runs in the caller's current stream,
// where nothing more is needed.
#include "torch/gpu_backend.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/limits.h"
#include "base/text.h"
#include "torch/allocator_trace.h"
#include "torch/arguments.h"
#include "torch/errors.h"
#include "torch/work.h"

#ifdef RINGREDUCE_CUDA
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include "cuda/communicator/host_communicator.h"
#include "cuda/cuda_stream.h"
#include "cuda/internode/internode_communicator.h"
#include "cuda/memory/own_memory.h"
#endif

namespace ringreduce {

// ---- built with or without CUDA

#ifdef RINGREDUCE_CUDA

std::shared_ptr<cuda::GpuCommunicator> makeHostCommunicator(const std::shared_ptr<Group>& group,
                                                            c10::Device device,
                                                            int ranks_on_device) {
  auto options = cuda::CommunicatorOptions::fromEnvironment();
  if (options.maps_pieces) followAllocator();
  options.ranks_on_device = ranks_on_device;
  return cuda::HostCommunicator::create(group, device.index(), options);
}

std::shared_ptr<cuda::GpuCommunicator> makeInterNodeCommunicator(
    const std::shared_ptr<Group>& group, c10::Device device, int ranks_on_device) {
  return cuda::InterNodeCommunicator::create(
      group, *group->epoch()->hosts, group->local(),
      makeHostCommunicator(group->local(), device, ranks_on_device), device.index());
}

CUstream_st* handleOf(const c10::Stream& stream) {
  return c10::cuda::CUDAStream(stream).stream();
}

std::shared_ptr<void> makeOwnMemory(c10::Device device, size_t bytes,
                                    std::vector<c10::Stream> streams) {
  return cuda::ownMemory(device.index(), bytes, [device, streams = std::move(streams)] {
    std::vector<CUstream_st*> handles{c10::cuda::getCurrentCUDAStream(device.index()).stream()};
    for (const c10::Stream& stream : streams) handles.push_back(handleOf(stream));
    return handles;
  });
}

bool isOwnMemory(const void* data, size_t bytes) {
  return cuda::ownSegmentOf(data, bytes) != nullptr;
}

std::shared_ptr<c10::Allocator> memAllocator() {
  // One for the process, and never destroyed: pools may outlive all groups.
  struct Pieces {
    std::mutex mutex;
    std::unordered_map<void*, std::shared_ptr<void>> by_address;
  };
  static auto* const pieces = new Pieces;
  static auto* const allocator = new std::shared_ptr<c10::Allocator>(
      torch::cuda::CUDAPluggableAllocator::createCustomAllocator(
          [](size_t bytes, int device, CUstream_st* stream) -> void* {
            const cuda::BesideCaptures beside;
            std::shared_ptr<void> memory;
            try {
              memory = cuda::ownMemory(device, bytes, [device, stream] {
                return std::vector<CUstream_st*>{
                    stream, c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device))};
              });
            } catch (const cuda::CudaError& error) {
              if (!error.is(cudaErrorMemoryAllocation)) throw;
              return nullptr;  // torch empties its cache, and tries again
            }
            void* const data = memory.get();
            const std::lock_guard lock(pieces->mutex);
            pieces->by_address[data] = std::move(memory);
            return data;
          },
          // Under the lock of torch's allocator, for memory that no recorded stream uses any more.
          [](void* data, size_t, int, CUstream_st*) {
            const std::lock_guard lock(pieces->mutex);
            pieces->by_address.erase(data);
          }));
  return *allocator;
}

bool isCapturing(c10::Device device) {
  const c10::cuda::CUDAGuard on(device);
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

std::shared_ptr<void> besideCaptures() {
  return std::make_shared<cuda::BesideCaptures>();
}

#else

namespace {

// Never called: requireCpu refuses CUDA tensors in this build.
[[noreturn]] void withoutCuda() {
  throw Error(Failure::kArgument,
              std::string("this ringreduce was built without CUDA (") + cudaMissing() + ")");
}

}  // namespace

std::shared_ptr<cuda::GpuCommunicator> makeHostCommunicator(const std::shared_ptr<Group>&,
                                                            c10::Device, int) {
  withoutCuda();
}

std::shared_ptr<cuda::GpuCommunicator> makeInterNodeCommunicator(const std::shared_ptr<Group>&,
                                                                 c10::Device, int) {
  withoutCuda();
}

CUstream_st* handleOf(const c10::Stream&) {
  withoutCuda();
}

std::shared_ptr<void> makeOwnMemory(c10::Device, size_t, std::vector<c10::Stream>) {
  withoutCuda();
}

bool isOwnMemory(const void*, size_t) {
  withoutCuda();
}

std::shared_ptr<c10::Allocator> memAllocator() {
  withoutCuda();
}

bool isCapturing(c10::Device) {
  withoutCuda();
}

std::shared_ptr<void> besideCaptures() {
  return nullptr;
}

#endif

namespace {

// How often a wait for a GPU looks for signals and for the group's failure.
constexpr Nanos kLook = 5 * kMillisecond;
// The end of a wait for a GPU.  The watchdog comes first: of a call that is late at the same time,
// it knows which rank to blame.
Nanos withWatchdogsTurn(Nanos timeout) {
  return deadlineIn(timeout > kNever - limits::kVerdict ? kNever : timeout + limits::kVerdict);
}

Error stillBusy(const Group& group, const char* failed, c10::Device device, Nanos timeout) {
  return {Failure::kTimeout,
          "rank " + group.options().shown(group.rank()) + " " + failed + ": " + device.str() +
              " was still busy with earlier work after " + seconds(timeout) +
              "; look for the kernel that does not end, or set a longer timeout"};
}

c10::impl::VirtualGuardImpl guardOf(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type());
}

// Whether it has come to its end, or a stream to all that is in it.  Other threads may capture
// meanwhile.
bool isReached(const c10::Event& event) {
  const auto beside = besideCaptures();
  return event.query();
}
bool isDrained(const c10::Stream& stream) {
  const auto beside = besideCaptures();
  return stream.query();
}

bool isCaptured(const c10::Stream& stream) {
  const c10::StreamGuard on(stream);
  return isCapturing(stream.device());
}

// torch's handle on an operation that was put into a stream: the contract of ProcessGroupNCCL.
//
// Nothing waits on the host, unless `wait` is given a timeout: it lets the caller's current stream
// wait, and the Future is complete once the operation is in its stream; work that uses its value
// is ordered behind it.  The Future makes an event, so there is none before somebody asks for it.
// An operation that fails later is thus not this Work's error but the group's, which `wait`,
// `exception` and the next call raise as soon as it is known.
class StreamWork final : public c10d::Work {
 public:
  // Ignores the job's operations: the caller puts them into the stream, then calls `enqueued`.  The
  // context of an error comes from the communicator (its calls' labels).
  // `kept`: tensors of a call in another stream than the caller's.
  StreamWork(int rank, uint64_t operation, const Job& job,
             const std::shared_ptr<cuda::GpuCommunicator>& communicator,
             std::shared_ptr<CallMarks> marks, const c10::Stream& stream, const c10::Stream& caller,
             std::vector<at::Tensor> kept)
      : c10d::Work(rank, job.type, job.title, job.inputs),
        outputs_(job.outputs),
        operation_(operation),
        sequence_(++job.observer->calls),
        future_of_one_(job.future_of_one),
        observer_(job.observer),
        communicator_(communicator),
        marks_(std::move(marks)),
        call_(++marks_->calls),
        stream_(stream),
        caller_(caller),
        kept_(std::move(kept)),
        timed_(observer_->timing),
        begin_(stream.device_type(),
               timed_ ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT),
        end_(timed_ ? std::make_shared<c10::Event>(stream.device_type(), begin_.flag())
                    : marks_->ends.take(stream.device_type())) {
    if (timed_) begin_.record(stream_);
  }

  // A Work that was dropped before a wait leaves its tensors to torch's allocator, which keeps
  // their memory until the operation's stream has come past it.
  ~StreamWork() override {
    try {
      releaseTensors(/*ordered=*/false);
    } catch (const std::exception& error) {
      log("rank " + std::to_string(rank_) + " could not record a stream: " + error.what());
    }
  }

  void enqueued() {
    end_->record(stream_);
    finish();
    // The events of a capture mean nothing later.
    if (isCaptured(stream_)) makeFuture(stream_);
  }
  // Call it without a lock: the observer may be the user's.
  void tell() const {
    if (observer_->hooked)
      tellObserver(*observer_, opType_, sequence_, started_, monotonicNow(), rank_);
  }
  void failed(std::exception_ptr error) { finish(std::move(error)); }

  bool isCompleted() override { return exception() != nullptr || isReached(*end_); }
  bool isSuccess() const override { return exception() == nullptr && isReached(*end_); }
  std::exception_ptr exception() const override {
    try {
      raise();
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }
  // With a timeout it does wait on the host, as NCCL's does.
  bool wait(std::chrono::milliseconds timeout) override {
    const Nanos limit = translated([&] { return timeoutOf(timeout); });
    synchronize();
    if (limit == 0 || limit == kNever) return true;
    for (const Nanos end = now() + limit; !isReached(*end_);) {
      raise();
      if (now() > end)
        translated([&] {
          throw Error(Failure::kTimeout,
                      "operation #" + std::to_string(operation_) + " on " + stream_.device().str() +
                          " was not done within the timeout of " + std::to_string(timeout.count()) +
                          " ms that Work.wait was given; it goes on",
                      {.is_final = false});
        });
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    raise();
    return true;
  }
  void synchronize() override {
    raise();
    const c10::Stream current = guardOf(stream_.device()).getStream(stream_.device());
    end_->block(current);
    // Only the caller's stream is that of the tensors.
    releaseTensors(/*ordered=*/current == caller_);
    unregister(this);
  }
  void abort() override {
    TORCH_CHECK(false, "an operation cannot be aborted alone; abort its group");
  }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const std::lock_guard lock(future_mutex_);
    if (future_) return future_;
    const bool is_last = marks_->calls == call_;  // nothing else is in the stream
    if (!is_last) end_->block(marks_->beside);
    makeFuture(is_last ? stream_ : marks_->beside);
    return future_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override {
    auto result = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
    const auto code = exception() ? c10d::WorkResult::COMM_ERROR : c10d::WorkResult::SUCCESS;
    result->markCompleted(c10::IValue(static_cast<int64_t>(code)));
    return result;
  }
  uint64_t getSequencenumber() const override { return sequence_; }
  float getDuration() const override {  // in ms, of its stream's time, once it is over
    TORCH_CHECK(timed_, "call _enable_collectives_timing() on the group before the operation");
    TORCH_CHECK(isReached(*end_), "the operation is not over yet");
    return static_cast<float>(begin_.elapsedTime(*end_));
  }

 private:
  void raise() const {  // the group's error, if there is one
    const auto communicator = communicator_.lock();
    if (!communicator) return;
    try {
      translated([&] { communicator->check(); });
    } catch (...) {
      observer_->noteFailure(observed_group_);
      throw;
    }
  }

  // Its value is ready behind what is in `at` now.
  void makeFuture(const c10::Stream& at) {
    auto made = c10::make_intrusive<c10::ivalue::Future>(futureType(future_of_one_),
                                                         std::vector<c10::Device>{at.device()});
    const c10::StreamGuard on(at);  // markCompleted() records events in the current streams
    made->markCompleted(future_of_one_ ? c10::IValue(outputs_.at(0)) : c10::IValue(outputs_));
    future_ = std::move(made);
  }

  // `ordered`: what follows in the tensors' stream follows the operation.
  void releaseTensors(bool ordered) {
    std::vector<at::Tensor> tensors;
    {
      const std::lock_guard lock(kept_mutex_);
      tensors.swap(kept_);
    }
    if (ordered || forkGeneration() != generation_) return;
    try {
      isCapturing(stream_.device());
    } catch (const c10::AcceleratorError&) {
      return;  // the GPU has failed: torch would ask it when it frees them, and end the process
    }
    const auto guard = guardOf(stream_.device());
    for (const at::Tensor& tensor : tensors)
      if (tensor.defined() && tensor.has_storage())
        guard.recordDataPtrOnStream(tensor.storage().data_ptr(), stream_);
  }

  const std::vector<at::Tensor> outputs_;
  const int generation_ = forkGeneration();  // forks before it was made
  const uint64_t operation_;                 // as errors number it
  const uint64_t sequence_;                  // as torch does
  const bool future_of_one_;
  const std::shared_ptr<Observer> observer_;
  const uint64_t observed_group_ = observer_->groups();
  const Nanos started_ = monotonicNow();
  // Not kept alive: a communicator that is gone has run or failed its operations.
  const std::weak_ptr<cuda::GpuCommunicator> communicator_;
  const std::shared_ptr<CallMarks> marks_;
  const uint64_t call_;  // on this GPU
  const c10::Stream stream_, caller_;
  std::mutex kept_mutex_;
  std::vector<at::Tensor> kept_;
  const bool timed_;
  c10::Event begin_;
  const std::shared_ptr<c10::Event> end_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace

GpuBackend::GpuBackend(int rank, int size, std::shared_ptr<Observer> observer,
                       MakeCommunicator make_communicator, MakeNccl make_nccl, BackendPtr staged)
    : c10d::Backend(rank, size),
      observer_(std::move(observer)),
      make_communicator_(std::move(make_communicator)),
      make_nccl_(std::move(make_nccl)),
      staged_(std::move(staged)) {}

GpuBackend::~GpuBackend() = default;

// ---- putting operations into streams

std::shared_ptr<GpuBackend::DeviceContext> GpuBackend::contextOf(c10::Device device) {
  const std::lock_guard lock(mutex_);
  const auto known = contexts_.find(device.index());
  if (known != contexts_.end()) return known->second;
  if (isCapturing(device))
    throw Error(Failure::kArgument,
                "ringreduce: a group's first call on " + device.str() +
                    " cannot be captured into a CUDA graph, since ranks must meet and memory be "
                    "taken first; make one before, or name the device when the group is made "
                    "(device_id=)");
  const c10::DeviceGuard on(device);
  const auto guard = guardOf(device);
  auto context = std::make_shared<DeviceContext>(DeviceContext{
      .communicator = make_communicator_(device),
      .stream = guard.getStreamFromGlobalPool(device, true),
      .ready = c10::Event(device.type()),
      .marks = std::make_shared<CallMarks>(guard.getStreamFromGlobalPool(device, true))});
  {
    const std::lock_guard made(made_mutex_);
    made_.push_back(context->communicator);
  }
  return contexts_.emplace(device.index(), std::move(context)).first->second;
}

GpuBackend::WorkPtr GpuBackend::enqueue(Job job, c10::Device device, bool async,
                                        const Tensors& used, const Put& put) {
  const std::shared_ptr<DeviceContext> context = contextOf(device);
  std::unique_lock lock(mutex_);
  if (context->communicator->callsNccl() && nccl_ &&
      std::find(others_coalesce_.begin(), others_coalesce_.end(), *nccl_) != others_coalesce_.end())
    throw Error(
        Failure::kArgument,
        "ringreduce: between hosts, calls that go together are either all_reduce or others, "
        "not both: NCCL would put off what the ring takes to be under way");
  const c10::DeviceGuard on(device);
  const auto guard = guardOf(device);
  const c10::Stream caller = guard.getStream(device);
  const c10::Stream stream = async ? context->stream : caller;
  job.observer = observer_;
  // Before it is known whether all of it can be put there: of several calls some may be.
  const auto work =
      c10::make_intrusive<StreamWork>(rank_, operations_++, job, context->communicator,
                                      context->marks, stream, caller, async ? used : Tensors());
  const auto start = [&] {
    if (async) {
      context->ready.record(caller);
      context->ready.block(stream);
    }
    const c10::StreamGuard in(stream);
    put(*context->communicator, stream);
    work->enqueued();
  };
  try {
    orAbort(start, [&](const std::string& why) { context->communicator->abort(why); });
  } catch (...) {
    work->failed(std::current_exception());
    throw;
  }
  if (coalescing_) coalesced_.push_back(work);
  lock.unlock();
  work->tell();  // a hook of the user's may call this again
  return work;
}

namespace {

// Gives a storage other memory, with the same contents for what follows in the stream.
void moveTo(std::shared_ptr<void> memory, const c10::Storage& storage, const c10::Stream& stream) {
  const auto options = at::TensorOptions().dtype(at::kByte).device(storage.device());
  const auto bytesAt = [&](void* data) {
    return at::from_blob(data, {static_cast<int64_t>(storage.nbytes())}, options);
  };
  void* const to = memory.get();
  bytesAt(to).copy_(bytesAt(storage.mutable_data()), /*non_blocking=*/true);
  guardOf(storage.device()).recordDataPtrOnStream(storage.data_ptr(), stream);
  const auto letGo = [](void* held) { delete static_cast<std::shared_ptr<void>*>(held); };
  storage.set_data_ptr_noswap(
      {to, new std::shared_ptr<void>(std::move(memory)), letGo, storage.device()});
}

}  // namespace

// Small tensors would waste what such memory is rounded up to, blocks of 2 MiB.
constexpr size_t kLeastOwn = 1 << 20;

std::shared_ptr<void> GpuBackend::ownMemoryFor(c10::Device device, const DeviceContext& context,
                                               size_t bytes) {
  // What a graph's capture allocates must stay as long as the graph, which torch sees to.
  if (bytes < kLeastOwn || !context.communicator->usesOwnMemory(bytes) || isCapturing(device))
    return nullptr;
  const auto beside = besideCaptures();
  const c10::DeviceGuard on(device);
  try {
    return makeOwnMemory(
        device, bytes, {guardOf(device).getStream(device), context.stream, context.marks->beside});
  } catch (const Error& error) {
    if (!told_no_memory_.exchange(true))
      log("rank " + std::to_string(rank_) + " takes memory of a DDP bucket or another tensor, " +
          std::to_string(bytes) +
          " bytes, from torch's allocator, so calls on it copy it: " + error.what());
  }
  return nullptr;
}

at::Tensor GpuBackend::allocateTensor(long size, at::TensorOptions options) {
  const c10::Device wanted = options.device();
  const c10::Device device =
      wanted.has_index() ? wanted : c10::impl::VirtualGuardImpl(wanted.type()).getDevice();
  // No communicator is made here: that would wait for the other ranks.
  std::shared_ptr<DeviceContext> context;
  if (const auto all = contexts(); all.contains(device.index())) context = all.at(device.index());
  const size_t bytes = static_cast<size_t>(size) * options.dtype().itemsize();
  std::shared_ptr<void> memory = context ? ownMemoryFor(device, *context, bytes) : nullptr;
  if (!memory) return at::empty({size}, options);
  void* const data = memory.get();
  return at::for_blob(data, {size})
      .deleter([memory = std::move(memory)](void*) mutable { memory.reset(); })
      .options(options.device(device))
      .target_device(device)
      .make_tensor();
}

bool GpuBackend::isMapped(const at::Tensor& tensor) const {
  const auto all = contexts();
  const auto context = all.find(tensor.device().index());
  return context != all.end() &&
         context->second->communicator->isMapped(tensor.const_data_ptr(), tensor.nbytes());
}

// Beside another backend DDP's buckets come from torch's allocator.  The hook moves each once to
// memory that peers map; all that views it, as gradients may, goes with it.  The zeros of a rank
// that runs out of inputs (torch's Join), in new memory at each step, have no views and stay.  So
// does each from the first capture on, as the graph has its address.
void GpuBackend::moveBucket(const at::Tensor& bucket) {
  const c10::Storage& storage = bucket.storage();
  const c10::Device device = bucket.device();
  if (!storage.mutable_data() || storage.use_count() == 1 || told_no_memory_ ||
      storage.nbytes() < kLeastOwn || isOwnMemory(storage.data(), storage.nbytes()))
    return;
  if (isCapturing(device)) captured_bucket_ = true;
  if (captured_bucket_) return;
  const std::shared_ptr<DeviceContext> context = contextOf(device);
  const c10::DeviceGuard on(device);
  if (auto memory = ownMemoryFor(device, *context, storage.nbytes()))
    moveTo(std::move(memory), storage, guardOf(device).getStream(device));
}

std::shared_ptr<HostTrip> GpuBackend::toHost(const at::Tensor& tensor) {
  const c10::Device device = tensor.device();
  if (isCapturing(device))
    throw Error(Failure::kArgument,
                "ringreduce: what goes through the host's memory, as compressed gradients do, "
                "cannot be captured into a CUDA graph");
  const auto beside = besideCaptures();
  const c10::DeviceGuard on(device);
  const HostTrip::Streams streams = [&] {
    const std::lock_guard lock(mutex_);
    auto known = trips_.find(device.index());
    if (known == trips_.end())
      known = trips_.emplace(device.index(), HostTrip::makeStreams(device)).first;
    return known->second;
  }();
  return std::make_shared<HostTrip>(tensor, streams);
}

// ---- its life

void GpuBackend::startCoalescing() {
  const std::lock_guard lock(mutex_);
  coalescing_ = true;
  others_coalesce_.clear();
  coalesced_.clear();  // of a block that an error has left without its end
}

GpuBackend::WorkPtr GpuBackend::endCoalescing() {
  std::vector<WorkPtr> works;
  std::vector<BackendPtr> others;
  {
    const std::lock_guard lock(mutex_);
    coalescing_ = false;
    works = std::exchange(coalesced_, {});
    others = std::exchange(others_coalesce_, {});
  }
  for (const BackendPtr& other : others)  // NCCL may wait for its peers here
    if (WorkPtr work = other->endCoalescing()) works.push_back(std::move(work));
  return c10::make_intrusive<WorkList>(rank_, std::move(works));
}

void GpuBackend::eagerConnectSingleDevice(at::Device device) {
  translated([&] { contextOf(device); });
}

void GpuBackend::setTimeout(std::chrono::milliseconds timeout) {
  const std::lock_guard lock(mutex_);
  if (nccl_ && *nccl_) (*nccl_)->setTimeout(timeout);
}

void GpuBackend::abort() {
  const std::lock_guard lock(mutex_);
  for (const auto& [index, context] : contexts_)
    translated([&] { context->communicator->abort("abort() was called"); });
  if (nccl_ && *nccl_) (*nccl_)->abort();
}

GpuBackend::Contexts GpuBackend::contexts() const {
  const std::lock_guard lock(mutex_);
  return contexts_;
}

void GpuBackend::check() const {
  for (const auto& [index, context] : contexts()) context->communicator->check();
}

void GpuBackend::shutdown() {
  decltype(contexts_) contexts;
  std::optional<BackendPtr> nccl;
  {
    const std::lock_guard lock(mutex_);
    contexts.swap(contexts_);
    // Not made again: later calls go to the CPU's backend, which has the error.
    nccl = std::exchange(nccl_, BackendPtr());
    others_coalesce_.clear();
  }
  if (forkGeneration() != generation_) {  // in a child their threads are not there
    if (nccl) (void)nccl->release();
    (void)new decltype(contexts)(std::move(contexts));
    return;
  }
  if (!nccl || !*nccl) return;
  (*nccl)->shutdown();
}

std::vector<c10::Device> GpuBackend::devices() const {
  const std::lock_guard lock(mutex_);
  std::set<c10::DeviceIndex> used = others_on_;
  for (const auto& [index, context] : contexts_) used.insert(index);
  std::vector<c10::Device> all;
  for (const c10::DeviceIndex index : used) all.emplace_back(c10::kCUDA, index);
  return all;
}

std::shared_ptr<c10::Event> GpuBackend::endOfCalls(c10::Device device) const {
  const std::lock_guard lock(mutex_);
  const auto known = contexts_.find(device.index());
  if (known == contexts_.end() || isCaptured(known->second->stream)) return nullptr;
  auto end = known->second->marks->ends.take(device.type());
  end->record(known->second->stream);
  return end;
}

void GpuBackend::drain(Group& group, std::optional<c10::Device> only, Nanos timeout,
                       const char* failed) {
  if (forkGeneration() != generation_) return;  // a child cannot use the parent's GPUs
  const Nanos deadline = withWatchdogsTurn(timeout);
  const auto told = [&](const std::string& why) { group.abort(why); };
  for (const c10::Device& device : only ? std::vector{*only} : devices()) {
    const c10::Stream stream = guardOf(device).getStream(device);
    if (isCapturing(device)) continue;
    const auto calls = orAbort([&] { return endOfCalls(device); }, told);
    const auto is_drained = [&] {
      return orAbort([&] { return isDrained(stream) && (!calls || isReached(*calls)); }, told);
    };
    for (Nanos look = now() + kLook; !is_drained();) {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      if (now() < look) continue;
      look = now() + kLook;
      group.interrupt("while it waited for a GPU");
      group.checkHealth();
      if (now() >= deadline) throw stillBusy(group, failed, device, timeout);
    }
  }
}

void GpuBackend::commit(Group& group, Nanos timeout) {
  if (forkGeneration() != generation_) return;
  constexpr auto kFailed = "did not commit";
  for (const c10::Device& device : devices())
    if (isCapturing(device))
      throw Error(Failure::kArgument,
                  "ringreduce.commit waits for " + device.str() +
                      ", which a stream that is captured into a CUDA graph cannot do; give a fused "
                      "optimizer the flag ringreduce.found_inf(), which works in graphs, or call "
                      "commit outside of the capture");
  group.drain();  // what goes through the host's memory ends with a copy in a stream
  const Nanos deadline = withWatchdogsTurn(timeout);
  drain(group, std::nullopt, timeout, kFailed);
  for (const auto& [index, context] : contexts())
    if (!context->communicator->wait(std::max<Nanos>(deadline - now(), 0)))
      throw stillBusy(group, kFailed, c10::Device(c10::kCUDA, index), timeout);
}

at::Tensor GpuBackend::foundInf(c10::Device device) {
  const std::shared_ptr<cuda::Local> local = contextOf(device)->communicator->local();
  return at::for_blob(&local->found_inf, {})
      .deleter([local](void*) {})
      .options(at::TensorOptions(at::kFloat).device(device))
      .target_device(device)
      .make_tensor();
}

std::vector<std::shared_ptr<cuda::GpuCommunicator>> GpuBackend::communicators() const {
  const std::lock_guard lock(made_mutex_);
  std::vector<std::shared_ptr<cuda::GpuCommunicator>> made;
  for (const auto& one : made_) made.push_back(one.lock());
  return made;
}

std::vector<std::vector<OpRecord>> GpuBackend::records(const std::vector<uint64_t>& since) const {
  const auto made = communicators();
  std::vector<std::vector<OpRecord>> found(made.size());
  for (size_t i = 0; i < made.size(); ++i)
    if (made[i]) found[i] = made[i]->records(i < since.size() ? since[i] : 0);
  return found;
}

std::vector<Totals> GpuBackend::totals() const {
  const auto made = communicators();
  std::vector<Totals> found(made.size());
  for (size_t i = 0; i < made.size(); ++i)
    if (made[i]) made[i]->addTo(found[i]);
  return found;
}

size_t GpuBackend::bytes() const {
  const std::lock_guard lock(mutex_);
  size_t sum = 0;
  for (const auto& [index, context] : contexts_) sum += context->communicator->bytes();
  return sum;
}

}  // namespace ringreduce
