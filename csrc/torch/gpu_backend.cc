// Ordering calls behind the caller's stream and putting them into one; communicators, and the
// backend's life. The calls themselves are in gpu_calls.cc and gpu_other_calls.cc.
//
// An asynchronous call runs in a stream of the backend's own; tensors are recorded on it, so that
// torch's allocator does not give their memory away too early.  A blocking call runs in the
// caller's current stream, where nothing more is needed.
#include "torch/gpu_backend.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "torch/errors.h"
#include "torch/gpu_communicators.h"
#include "torch/stream_work.h"

namespace ringreduce {
namespace {

c10::impl::VirtualGuardImpl guardOf(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type());
}

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
  auto context = std::make_shared<DeviceContext>(DeviceContext{
      {}, make_communicator_(device), guardOf(device).getStreamFromGlobalPool(device, true)});
  return contexts_.emplace(device.index(), std::move(context)).first->second;
}

GpuBackend::WorkPtr GpuBackend::enqueue(Job job, c10::Device device, bool async,
                                        const Tensors& used, const Put& put) {
  const std::shared_ptr<DeviceContext> context = contextOf(device);
  std::unique_lock lock(mutex_);
  if (context->communicator->callsNccl() && nccl_ &&
      std::find(others_coalesce_.begin(), others_coalesce_.end(), nccl_->get()) !=
          others_coalesce_.end())
    throw Error(
        Failure::kArgument,
        "ringreduce: between hosts, calls that go together are either all_reduce or others, "
        "not both: NCCL would put off what the ring takes to be under way");
  const c10::DeviceGuard on(device);
  const auto guard = guardOf(device);
  const c10::Stream caller = guard.getStream(device);
  const c10::Stream stream = async ? context->stream : caller;
  job.observer = observer_;
  const auto work =
      c10::make_intrusive<StreamWork>(rank_, sequence_++, job, context->communicator, stream);
  try {
    if (async) {
      c10::Event ready(device.type());
      ready.record(caller);
      ready.block(stream);
      // Before it is known whether all of it can be put there: of several calls some may be.
      for (const at::Tensor& tensor : used)
        if (tensor.defined() && tensor.has_storage())
          guard.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
    }
    const c10::StreamGuard in(stream);
    put(*context->communicator, stream);
    work->enqueued();
  } catch (...) {
    work->failed(std::current_exception());
    throw;
  }
  if (coalescing_) coalesced_.push_back(work);
  lock.unlock();
  work->tell();  // a hook of the user's may call this again
  return work;
}

// A bucket is seen here at every step, and it is all ranks' that DDP makes new ones, so what is new
// to one rank is new to all.  It is kept until the group ends, since peers map its memory; but
// there are few, DDP makes its buckets once and again after the first step.  Of one that was
// refused only what tells it from others is kept: while that is there, no other is at its address.
void GpuBackend::registerBucket(const at::Tensor& bucket) {
  const std::shared_ptr<DeviceContext> context = contextOf(bucket.device());
  if (!context->communicator->gainsByRegistering() || isCapturing(bucket.device())) return;
  const std::lock_guard lock(mutex_);
  const c10::Storage& storage = bucket.storage();
  void* const data = storage.mutable_data();
  if (!data) return;
  const auto [seen, is_new] = context->buckets.try_emplace(
      storage.unsafeGetStorageImpl(), DeviceContext::Bucket{storage.getWeakStorageImpl(), storage});
  if (!is_new) return;
  const c10::DeviceGuard on(bucket.device());
  // Why not does not matter here: the bucket then goes by way of staging memory, like any other.
  if (!context->communicator->registerBuffer(data, storage.nbytes()).empty())
    seen->second.kept = {};
}

std::shared_ptr<HostTrip> GpuBackend::toHost(const at::Tensor& tensor) {
  const c10::Device device = tensor.device();
  if (isCapturing(device))
    throw Error(Failure::kArgument,
                "ringreduce: what goes through the host's memory, as compressed gradients do, "
                "cannot be captured into a CUDA graph");
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
  std::vector<c10d::Backend*> others;
  {
    const std::lock_guard lock(mutex_);
    coalescing_ = false;
    works = std::exchange(coalesced_, {});
    others = std::exchange(others_coalesce_, {});
  }
  for (c10d::Backend* other : others)  // NCCL may wait for its peers here
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

void GpuBackend::shutdown() {
  decltype(contexts_) contexts;
  std::optional<BackendPtr> nccl;
  {
    const std::lock_guard lock(mutex_);
    contexts.swap(contexts_);
    // Not to be made again: calls from now on go to the CPU's backend, which says what has
    // happened.
    nccl = std::exchange(nccl_, BackendPtr());
  }
  if (forkGeneration() != generation_) {  // in a child their threads are not there
    if (nccl) (void)nccl->release();
    (void)new decltype(contexts)(std::move(contexts));
    return;
  }
  if (!nccl || !*nccl) return;
  const auto has_failed = [](const auto& entry) {
    try {
      entry.second->communicator->check();
    } catch (const Error&) {
      return true;
    }
    return false;
  };
  // With a rank that is gone, NCCL would wait for calls that never end.
  if (std::any_of(contexts.begin(), contexts.end(), has_failed))
    (*nccl)->abort();
  else
    (*nccl)->shutdown();
}

size_t GpuBackend::bytes() const {
  const std::lock_guard lock(mutex_);
  size_t sum = 0;
  for (const auto& [index, context] : contexts_) sum += context->communicator->bytes();
  return sum;
}

}  // namespace ringreduce
