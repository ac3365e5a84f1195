// The backend's calls on CUDA tensors.  Calls that the communicator performs go into streams, as
// in ProcessGroupNCCL.  All others go to torch's NCCL backend, or, if NCCL does not support them or
// cannot start (ranks that share a GPU), through the host's memory (staged_backend.h).
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "base/fd.h"
#include "base/spares.h"
#include "cuda/communicator/gpu_communicator.h"
#include "group/group.h"
#include "torch/staged_backend.h"
#include "torch/torch_calls.h"
#include "torch/work.h"

namespace ringreduce {

// These functions, and besideCaptures, need CUDA to be built.  All else knows streams and events by
// torch's interface for any device.

// Collective over the group: the communicator of its ranks' GPUs, `device` this rank's, on which
// there are so many ranks, if more than the group's own.  Throws Error.
std::shared_ptr<cuda::GpuCommunicator> makeHostCommunicator(const std::shared_ptr<Group>& group,
                                                            c10::Device device,
                                                            int ranks_on_device);
// The same over several hosts.
std::shared_ptr<cuda::GpuCommunicator> makeInterNodeCommunicator(
    const std::shared_ptr<Group>& group, c10::Device device, int ranks_on_device);
// As the communicator takes it.
CUstream_st* handleOf(const c10::Stream& stream);
// Memory that peers can map (cuda/memory/own_memory.h), which is given back behind what is then in
// these streams and in the current one.  Throws Error.
std::shared_ptr<void> makeOwnMemory(c10::Device device, size_t bytes,
                                    std::vector<c10::Stream> streams);
// The same for the pools of torch's allocator, of all groups.
std::shared_ptr<c10::Allocator> memAllocator();
// Whether the device's current stream is captured into a CUDA graph.
bool isCapturing(c10::Device device);

// What the calls on one GPU share, and their Works keep.
struct CallMarks {
  explicit CallMarks(const c10::Stream& stream) : beside(stream) {}
  const c10::Stream beside;  // of Futures that somebody asks for after the next call
  Spares<c10::Event> ends;
  std::atomic<uint64_t> calls = 0;
};

class GpuBackend final : public c10d::Backend {
 public:
  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  // Makes the NCCL backend when it is first needed; null where it cannot start.
  using MakeNccl = std::function<BackendPtr()>;
  // Makes the communicator of a device, with all ranks, when it is first used.
  using MakeCommunicator = std::function<std::shared_ptr<cuda::GpuCommunicator>(c10::Device)>;

  GpuBackend(int rank, int size, std::shared_ptr<Observer> observer,
             MakeCommunicator make_communicator, MakeNccl make_nccl, BackendPtr staged);
  ~GpuBackend() override;

  const std::string getBackendName() const override { return "ringreduce"; }

  // Those that the communicator performs, and then the other backend's (gpu_calls.cc).  A barrier
  // is NCCL's: for groups over several hosts.
  RINGREDUCE_DECLARE_CALLS
  // The average over all ranks, in place, of one DDP bucket.
  BucketAverage averageBucket(const at::Tensor& bucket, uint64_t borders, Context context);

  // An uninitialised tensor of so many elements: in memory that peers can map, where calls on it
  // are then faster, or in the caching allocator's.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  // Whether all ranks can use a tensor where it is, by now.
  bool isMapped(const at::Tensor& tensor) const;

  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  // Makes the device's communicator, so that the first call need not.  Collective.
  void eagerConnectSingleDevice(at::Device device) override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void abort() override;
  void shutdown() override;
  // Waits for the current stream of GPU `only`, or those of all GPUs that the group has used, and
  // for asynchronous calls so far, unless they are captured.  Throws Error if the group fails or
  // `timeout` is over meanwhile; it `failed` then, as its text says: "did not enter a barrier".
  void drain(Group& group, std::optional<c10::Device> only, Nanos timeout, const char* failed);
  // Waits until the group's queue is empty, then as `drain`, and then for all calls of
  // communicators, in whatever stream they are.  Throws the group's error if there is one by then,
  // and Error(kArgument) if a current stream is captured.
  void commit(Group& group, Nanos timeout);
  // The flag of the device's communicator (GpuCommunicator::local), which it makes if there is
  // none.
  at::Tensor foundInf(c10::Device device);
  // Throws Error if an operation has failed.  Its stream must have finished it.
  void check() const;

  size_t bytes() const;  // of device memory that the communicators hold
  // As GpuCommunicator::records, of each communicator in the order in which they were made; one
  // that is not in `since` is read from its first.  Never waits for a call that is put into a
  // stream.
  std::vector<std::vector<OpRecord>> records(const std::vector<uint64_t>& since) const;
  // The sums of each of them, in the same order.
  std::vector<Totals> totals() const;

  // Starts to copy a tensor to the host's memory, for a call that goes through it without a wait.
  // Needs no communicator.
  std::shared_ptr<HostTrip> toHost(const at::Tensor& tensor);

 private:
  struct DeviceContext {
    std::shared_ptr<cuda::GpuCommunicator> communicator;
    c10::Stream stream;  // asynchronous operations run here, one after the other
    c10::Event ready;    // of the caller's stream, when one is put there
    std::shared_ptr<CallMarks> marks;
  };
  // In the order in which they were made; null: it is gone.
  std::vector<std::shared_ptr<cuda::GpuCommunicator>> communicators() const;
  // Puts an operation into the current stream, which is `stream`.
  using Put = std::function<void(cuda::GpuCommunicator&, const c10::Stream&)>;

  std::vector<c10::Device> devices() const;  // that the group has used
  // Of asynchronous calls so far; null if there are none, or if they are captured.
  std::shared_ptr<c10::Event> endOfCalls(c10::Device device) const;
  using Contexts = std::map<c10::DeviceIndex, std::shared_ptr<DeviceContext>>;
  Contexts contexts() const;
  // The caller keeps it alive, even if the group shuts down meanwhile.
  std::shared_ptr<DeviceContext> contextOf(c10::Device device);
  bool performs(c10::Device device, Kind kind) {
    return contextOf(device)->communicator->performs(kind);
  }
  WorkPtr enqueue(Job job, c10::Device device, bool async, const Tensors& used, const Put& put);
  // Null, with a word in the log, if there is none to be had.
  std::shared_ptr<void> ownMemoryFor(c10::Device device, const DeviceContext& context,
                                     size_t bytes);
  void moveBucket(const at::Tensor& bucket);
  // The backend that takes a call which no communicator performs.  The caller keeps it alive, even
  // if the group shuts down meanwhile.
  BackendPtr nccl();  // null: it cannot start.  With the lock held
  BackendPtr other(const at::Tensor& tensor, const c10d::ReduceOp& op = c10d::ReduceOp::SUM);
  BackendPtr other(const Tensors& tensors) { return other(tensors.at(0)); }

  mutable std::mutex made_mutex_;  // of `made_`
  std::vector<std::weak_ptr<cuda::GpuCommunicator>> made_;
  const int generation_ = forkGeneration();  // forks before it was made
  const std::shared_ptr<Observer> observer_;
  const MakeCommunicator make_communicator_;
  const MakeNccl make_nccl_;
  const BackendPtr staged_;
  std::atomic<bool> told_no_memory_ = false, captured_bucket_ = false;
  // Guards the rest; held while an operation is put into its stream.  Recursive: a wait for other
  // ranks runs Python's signal handlers meanwhile, and these may end the group.
  mutable std::recursive_mutex mutex_;
  Contexts contexts_;
  std::map<c10::DeviceIndex, HostTrip::Streams> trips_;
  std::optional<BackendPtr> nccl_;        // null: it cannot start
  std::set<c10::DeviceIndex> others_on_;  // GPUs of calls that the other backends took
  uint64_t operations_ = 0;
  bool coalescing_ = false;
  std::vector<BackendPtr> others_coalesce_;  // that were told to since startCoalescing
  std::vector<WorkPtr> coalesced_;           // native ones; the others keep their own
};

}  // namespace ringreduce
