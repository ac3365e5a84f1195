// A rank's end of the ring between hosts: nccl_schedule.h's steps in two CUDA streams, over a
// communicator of NCCL.
//
// It gives the bits of the core's ring over the same ranks (algorithm/ring.h).  It detects only
// errors of NCCL and CUDA, and keeps no deadlines: internode_communicator.h does.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <deque>
#include <functional>
#include <memory>

#include "base/clock.h"
#include "cuda/cuda_stream.h"
#include "cuda/internode/nccl.h"
#include "cuda/internode/nccl_schedule.h"
#include "cuda/kernels/kernel_call.h"
#include "cuda/kernels/reduce_n.h"
#include "cuda/memory/device_memory.h"

namespace ringreduce::cuda {

struct RingSum {
  const void* input;
  void* output;  // may be the input
  size_t count;
  DType dtype;
  Arithmetic arithmetic;                   // world_size: the divisor of AVG
  const void* factor_on_device = nullptr;  // PREMUL_SUM: replaces the factor
  AbortFlag* abort;                        // in memory that kernels reach
};

class NcclRing {
 public:
  // Collective over the ring's ranks, two or more: joins NCCL's communicator, and exchanges a word
  // with its neighbours, so that all connections exist before the first call.  Throws Error;
  // kTimeout after `timeout`, which NCCL itself does not have: a thread then stays behind in NCCL.
  // It calls `meanwhile` repeatedly, which throws to end it.
  static std::unique_ptr<NcclRing> join(std::shared_ptr<const NcclLibrary> library,
                                        const NcclId& id, int rank, int size, int device,
                                        Nanos timeout, const std::function<void()>& meanwhile);
  NcclRing(std::unique_ptr<NcclCommunicator> comm, int device, Nanos timeout);
  ~NcclRing();  // waits for its stream, unless it was aborted
  NcclRing(const NcclRing&) = delete;
  NcclRing& operator=(const NcclRing&) = delete;

  // Puts it into `stream` and the ring's own.  One call at a time; in another stream than the last
  // call only behind that call.  A host that is far ahead of its GPU waits here, so that no call of
  // CUDA does, and calls `meanwhile`, which throws to end that.
  void allReduce(const RingSum& sum, cudaStream_t stream, const std::function<void()>& meanwhile);

  void check() const { comm_->check(); }  // throws if NCCL has failed since
  // Ends transfers under way.  From any thread, but not during `allReduce`.
  void abort() { comm_->abort(); }

  size_t bytes() const { return slots_->bytes(); }

 private:
  void greet(Nanos timeout);
  void keepPace(const std::function<void()>& meanwhile);
  void exchange(const RingStep& step, const RingPlan& plan, const RingSum& sum);
  void add(const RingStep& step, const RingPlan& plan, const RingSum& sum, cudaStream_t stream);
  std::byte* place(const RingPlace& p, size_t begin, const RingPlan& plan,
                   const RingSum& sum) const;

  const std::unique_ptr<NcclCommunicator> comm_;
  const int device_, multiprocessors_;
  const int next_, previous_;
  MemoryPtr slots_;
  Stream wire_;
  std::array<Event, kRingEvents> events_;
  EventPool pool_;
  // How far the wire has come, by the number of exchanges.
  struct Mark {
    uint64_t exchanges;
    std::shared_ptr<Event> event;
  };
  std::deque<Mark> marks_;
  uint64_t exchanges_ = 0;
};

}  // namespace ringreduce::cuda
