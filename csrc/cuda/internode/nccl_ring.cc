// Joining, and the steps as calls of NCCL and CUDA.
#include "cuda/internode/nccl_ring.h"

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "base/error.h"
#include "base/text.h"
#include "cuda/cuda_stream.h"
#include "cuda/gpu_device.h"
#include "cuda/kernels/kernel_table.h"
#include "cuda/kernels/stream_kernels.h"

namespace ringreduce::cuda {
namespace {

// Blocks of a kernel that adds: some 30 GB/s each, and links between hosts take 50 in all.  The
// rest of the GPU is for other work.
constexpr int kRingBlocks = 32;
// The host may be this many exchanges ahead of the wire: far fewer than the launches, about a
// thousand, that CUDA takes before it makes the host wait.
constexpr uint64_t kMostAhead = 256, kMarkEvery = 32;

constexpr std::chrono::milliseconds kLook{50};

void nap() {
  std::this_thread::sleep_for(std::chrono::microseconds(50));
}

}  // namespace

// ---- joining

std::unique_ptr<NcclRing> NcclRing::join(std::shared_ptr<const NcclLibrary> library,
                                         const NcclId& id, int rank, int size, int device,
                                         Nanos timeout, const std::function<void()>& meanwhile) {
  struct Attempt {
    std::mutex mutex;
    std::condition_variable changed;
    bool over = false;
    std::unique_ptr<NcclRing> ring;
    std::exception_ptr error;
  };
  const auto attempt = std::make_shared<Attempt>();
  const auto connect = [=] {
    pthread_setname_np(pthread_self(), "ringreduce-nccl");
    std::unique_ptr<NcclRing> ring;
    std::exception_ptr error;
    try {
      const OnDevice here(device);
      ring = std::make_unique<NcclRing>(std::make_unique<NcclCommunicator>(library, id, rank, size),
                                        device, timeout);
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(attempt->mutex);
    attempt->ring = std::move(ring);
    attempt->error = error;
    attempt->over = true;
    attempt->changed.notify_all();
  };
  std::thread thread;
  try {
    thread = std::thread(connect);
  } catch (const std::system_error& error) {
    throw Error(Failure::kSetup, noThread("that connects NCCL", error));
  }
  std::unique_lock lock(attempt->mutex);
  try {
    for (const Nanos deadline = deadlineIn(timeout); !attempt->over;) {
      attempt->changed.wait_for(lock, kLook);
      if (attempt->over) break;
      meanwhile();
      if (now() >= deadline)
        throw Error(Failure::kTimeout,
                    library->description() + " does not connect rank " + std::to_string(rank) +
                        " of a ring of " + std::to_string(size) + " with the others within " +
                        seconds(timeout) +
                        ", though all had come: see whether NCCL_SOCKET_IFNAME names the network "
                        "between the hosts and what NCCL_DEBUG=INFO says");
    }
  } catch (...) {
    thread.detach();
    throw;
  }
  lock.unlock();
  thread.join();
  if (attempt->error) std::rethrow_exception(attempt->error);
  return std::move(attempt->ring);
}

NcclRing::NcclRing(std::unique_ptr<NcclCommunicator> comm, int device, Nanos timeout)
    : comm_(std::move(comm)),
      device_(device),
      multiprocessors_(describeDevice(device).multiprocessors),
      next_((comm_->rank() + 1) % comm_->worldSize()),
      previous_((comm_->rank() + comm_->worldSize() - 1) % comm_->worldSize()),
      slots_(allocate(device, kRingSlots * kRingSlotBytes)),
      wire_(device) {
  try {
    greet(timeout);
  } catch (const Error&) {
    comm_->abort();  // else the destructor would wait for the missing rank
    throw;
  }
}

NcclRing::~NcclRing() = default;

// NCCL connects two ranks in their first call for each other, which waits for both.
void NcclRing::greet(Nanos timeout) {
  const int mine = comm_->rank();
  std::byte* const theirs = slots_->data() + kRingSlotBytes;
  wire_.copy(slots_->data(), &mine, sizeof mine);
  NcclGroup group(comm_->library());
  comm_->send(slots_->data(), sizeof mine, next_, wire_.get());
  comm_->recv(theirs, sizeof mine, previous_, wire_.get());
  group.end();
  Event done;
  done.record(wire_.get());
  for (const Nanos deadline = deadlineIn(timeout); !done.isReached(); nap()) {
    comm_->check();
    if (now() >= deadline)
      throw Error(Failure::kTimeout, "nothing came from the rank before this one in a ring of " +
                                         comm_->library().description() + " within " +
                                         seconds(timeout));
  }
  int got = -1;
  wire_.copy(&got, theirs, sizeof got);
  if (got != previous_)
    throw Error(Failure::kSetup, comm_->library().description() + " brought rank " +
                                     std::to_string(mine) + " of a ring the word of rank " +
                                     std::to_string(got) + " instead of that of rank " +
                                     std::to_string(previous_) +
                                     ": its transfers cannot be trusted here");
}

// ---- calls

void NcclRing::allReduce(const RingSum& sum, cudaStream_t stream,
                         const std::function<void()>& meanwhile) {
  if (sum.count == 0) return;
  const int size = comm_->worldSize();
  const bool wide = travelsWide(sum.dtype, size);
  const RingPlan plan{.rank = comm_->rank(),
                      .size = size,
                      .count = sum.count,
                      .slice = ringSlice(sum.count, size, wide ? sizeof(float) : sizeOf(sum.dtype)),
                      .wide = wide,
                      .scaled = sum.arithmetic.scale};
  const bool paced = !captureOf(stream);
  for (const RingStep& step : ringSteps(plan)) {
    const cudaStream_t in = isOnWire(step) ? wire_.get() : stream;
    if (step.waits >= 0) events_[static_cast<size_t>(step.waits)].holdBack(in);
    if (isOnWire(step)) {
      exchange(step, plan, sum);
      ++exchanges_;
      if (paced) keepPace(meanwhile);
    } else if (step.what == RingStep::Do::kStage || step.what == RingStep::Do::kAdd) {
      add(step, plan, sum, stream);
    }
    if (step.records >= 0) events_[static_cast<size_t>(step.records)].record(in);
  }
}

void NcclRing::keepPace(const std::function<void()>& meanwhile) {
  if (exchanges_ % kMarkEvery == 0) {
    marks_.push_back({exchanges_, pool_.take()});
    marks_.back().event->record(wire_.get());
  }
  while (!marks_.empty() && exchanges_ - marks_.front().exchanges >= kMostAhead) {
    while (!marks_.front().event->isReached()) {
      meanwhile();
      nap();
    }
    marks_.pop_front();
  }
}

std::byte* NcclRing::place(const RingPlace& p, size_t begin, const RingPlan& plan,
                           const RingSum& sum) const {
  using In = RingPlace::In;
  const size_t offset = begin * sizeOf(sum.dtype);
  switch (p.in) {
    case In::kInput:
      return static_cast<std::byte*>(const_cast<void*>(sum.input)) + offset;
    case In::kOutput:
      return static_cast<std::byte*>(sum.output) + offset;
    default:
      return slots_->data() + p.slot * kRingSlotBytes +
             (p.in == In::kAddends && plan.wide ? plan.slice * sizeof(float) : 0);
  }
}

void NcclRing::exchange(const RingStep& step, const RingPlan& plan, const RingSum& sum) {
  const auto bytes = [&](const RingPlace& p, size_t n) {
    return n * (p.in == RingPlace::In::kSums && plan.wide ? sizeof(float) : sizeOf(sum.dtype));
  };
  if (step.elements.size + step.coming.size == 0) return;
  NcclGroup group(comm_->library());
  if (step.elements.size > 0)
    comm_->send(place(step.from, step.elements.begin, plan, sum),
                bytes(step.from, step.elements.size), next_, wire_.get());
  if (step.coming.size > 0)
    comm_->recv(place(step.to, step.coming.begin, plan, sum), bytes(step.to, step.coming.size),
                previous_, wire_.get());
  group.end();
}

void NcclRing::add(const RingStep& step, const RingPlan& plan, const RingSum& sum,
                   cudaStream_t stream) {
  using In = RingPlace::In;
  const Span what = step.elements;
  const int blocks = std::min(
      kRingBlocks, blocksToMove(what.size * sizeOf(sum.dtype), std::max(1, multiprocessors_)));
  const std::byte* own = place({In::kInput}, what.begin, plan, sum);
  std::byte* to = place(step.to, what.begin, plan, sum);
  const void* factor = sum.arithmetic.scale ? sum.factor_on_device : nullptr;
  if (step.what == RingStep::Do::kStage) {
    const CopyCall call{.from = own,
                        .to = to,
                        .count = what.size,
                        .arithmetic = sum.arithmetic,
                        .abort = sum.abort,
                        .factor = factor};
    launch(kernelsOf(sum.dtype).copy_in, blocks, &call, false, stream);
    return;
  }
  const RingStepCall call{.partial = place(step.from, what.begin, plan, sum),
                          .own = own,
                          .to = to,
                          .count = what.size,
                          .partial_is_wide = step.from.in == In::kSums && plan.wide,
                          .to_is_wide = step.to.in == In::kSums && plan.wide,
                          .last = step.last,
                          .arithmetic = sum.arithmetic,
                          .factor = factor};
  launch(kernelsOf(sum.dtype).ring_step, blocks, &call, false, stream);
}

}  // namespace ringreduce::cuda
