// The state of a communicator, for the files that implement it.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/fd.h"
#include "cuda/communicator/call_order.h"
#include "cuda/communicator/host_communicator.h"
#include "cuda/communicator/host_ranks.h"
#include "cuda/cuda_stream.h"
#include "cuda/gpu_device.h"
#include "cuda/kernels/direct_schedule.h"
#include "cuda/kernels/kernel_table.h"
#include "cuda/kernels/nvls.h"
#include "cuda/kernels/stream_kernels.h"
#include "cuda/memory/device_memory.h"
#include "cuda/memory/multicast.h"
#include "cuda/memory/peer_memory.h"
#include "cuda/memory/segment_board.h"
#include "group/agreement.h"

namespace ringreduce::cuda {

struct HostCommunicator::State {
  State(std::shared_ptr<Group> group, int device, const CommunicatorOptions& options);

  // --- calls

  // The signature of a call, which ranks compare, and the rest that the watchdog needs.
  struct Told {
    OpSignature what;
    Nanos timeout;
    const Label& label;
  };
  // All ranks must take the same algorithm.
  Told told(const GpuAllReduce& call, Choice taken) const {
    return told(call, {.kind = Kind::kAllReduce,
                       .op = code(call.op),
                       .parts = static_cast<uint64_t>(taken) ^ call.borders});
  }
  Told told(const GpuReduceScatter& call) const {
    return told(call, {.kind = Kind::kReduceScatter, .op = code(call.op)});
  }
  Told told(const GpuAllGather& call) const { return told(call, {.kind = Kind::kAllGather}); }
  Told told(const GpuBroadcast& call) const {
    return told(call, {.kind = Kind::kBroadcast, .root = call.root});
  }
  void validate(const GpuReduceScatter& call) const;
  void validate(const GpuAllGather& call) const;
  void validate(const GpuBroadcast& call) const;
  Choice choose(size_t count, DType dtype, Choice wanted) const;
  Choice choose(const GpuAllReduce& call) const;
  // Collective, for kNvls.  Throws the same Error on all ranks where it is not to be had.
  void makeWindow();
  // Whether calls other than all-reduce take the direct schedule.  The same on all ranks, since
  // rank 0's option holds for all.
  bool partsAreDirect() const {
    return !setting.run_at_once || options.algorithm == Choice::kDirect;
  }
  // Whether an all-reduce of so many bytes uses tensors where they are; the same on all ranks.
  bool isLocated(size_t bytes, Choice wanted) const;
  // The same of a call with parts of `count` elements.
  bool partsAreLocated(size_t count, DType dtype) const;
  // Where a tensor is that peers read or write, of parts of so many bytes; none if it has to be
  // copied.  `later`: the call's kernels look again, when they run, whether peers map it.
  Place placeOf(const void* data, size_t parts, size_t bytes, cudaStream_t stream,
                bool later = true);
  // Where this rank's tensors are, for its kernel.
  Location locationOf(const GpuAllReduce& call, cudaStream_t stream, bool later = true);
  Location locationOf(const GpuReduceScatter& call, cudaStream_t stream);
  Location locationOf(const GpuAllGather& call, cudaStream_t stream);
  PartShape shapeOf(const GpuAllReduce& call, Choice choice) const;
  Arithmetic arithmeticOf(DType dtype, ReduceOp op, double factor) const;
  // A kernel's arguments, without a slice.  The second is of calls that only move data, and the
  // first of those that add.
  template <class Call>
  RankCall rankCall(const Call& call, uint64_t number) const;
  RankCall movingCall(const void* input, void* output, size_t count, DType dtype, Nanos timeout,
                      uint64_t number) const;
  Nanos timeoutOf(Nanos wanted) const { return wanted > 0 ? wanted : group->timeout(); }
  // A call that was announced and left to the watchdog, which has to know of it before it is in the
  // stream: the host may wait in a call of CUDA until the other ranks have made the call.
  struct Begun {
    uint64_t number;
    std::shared_ptr<CallEnd> end;
    std::shared_ptr<CallEnd> start;  // null while nobody reads the records
  };
  // `marked`: the caller sets `start`.
  Begun begin(const Told& told, bool marked = false);
  void finish(CallEnd& end, cudaStream_t stream);
  // Ends a call of which parts may be in the stream.
  void finishRest(CallEnd& end, cudaStream_t stream);
  // The other ranks wait for the rest of it, and must learn why it does not come.
  [[noreturn]] void giveUp(const Error& why, const Label& label);
  // An error is not told here: the watchdog does not know of the call yet, and follow() meets the
  // error again.
  static bool isCaptured(cudaStream_t stream, bool if_unknown) {
    try {
      return captureOf(stream).has_value();
    } catch (const Error&) {
      return if_unknown;
    }
  }
  // Begins the call, lets put(its number) put it into the stream, behind the one before, and ends
  // it.
  template <class Put>
  void dispatch(const Told& told, cudaStream_t stream, Put&& put);
  // Puts a call other than all-reduce into the stream: direct, or by launching a kernel that waits
  // for its peers.  `alone`: its work in a group of one rank, which is done directly if it is null.
  template <class Call, class Alone, class Push>
  void perform(const Call& call, cudaStream_t stream, Alone alone, Push push);
  void push(RankCall call, const void* kernel, const void* fixed, size_t bytes,
            cudaStream_t stream);
  // The same for a call on tensors where they are, with parts of elements of `width` bytes.
  void launchLocated(RankCall call, const void* kernel, size_t width, const Location& location,
                     cudaStream_t stream) const;
  // The kernels of a call for this very number of ranks; null if there are none.
  const FixedKernels* fixedOf(DType dtype, ReduceOp op) const;
  // Launches this rank's kernel of a call that waits for its peers: `fixed`, which takes a
  // RankLaunch, or `kernel` if it is null.
  void launchRank(const RankCall& call, const void* kernel, const void* fixed, int channels,
                  cudaStream_t stream, const Location& location = {}) const;

  // --- the direct schedule (direct_stream.cc)
  struct Turn;
  void direct(const GpuAllReduce& call, cudaStream_t stream);
  void direct(const GpuReduceScatter& call, cudaStream_t stream);
  void direct(const GpuAllGather& call, cudaStream_t stream);
  void direct(const GpuBroadcast& call, cudaStream_t stream);
  void put(const std::vector<ScheduleStep>& steps, const Turn& turn, cudaStream_t stream);
  LookCall lookCall(const GpuAllReduce& call, const Location& here, uint64_t number) const;
  DeliverCall deliverCall(void* output, size_t bytes, DType dtype) const;
  void putOwn(const std::vector<Span>& pieces, int root, const Turn& turn, cudaStream_t stream);
  size_t halfOfStaging() const;
  StagedAt stagedAt(int half) const;
  // Copies this rank's inputs to memory that peers read, and scales them for PREMUL_SUM.
  template <class Call>
  void stage(const Call& call, size_t first, std::byte* to, size_t count, cudaStream_t stream);
  void carry(const CarryCall& call, DType dtype, cudaStream_t stream);

  HostState* state(int r) const { return reinterpret_cast<HostState*>(pages->onHost(r)); }
  HostState* stateOnDevice(int r) const { return reinterpret_cast<HostState*>(pages->onDevice(r)); }
  const DeviceComm* commOnDevice() const {
    return reinterpret_cast<const DeviceComm*>(local->data());
  }
  Local* localOnDevice() const {
    return reinterpret_cast<Local*>(local->data() + roundUp(sizeof(DeviceComm), kLine));
  }
  // Where a leader's kernels find all ranks' tensors.
  PeerTensors* foundOnDevice() const { return reinterpret_cast<PeerTensors*>(localOnDevice() + 1); }

  const std::shared_ptr<Group> group;
  const int device;
  const int generation = forkGeneration();  // forks before it was made
  CommunicatorOptions options;
  Device facts;
  Setting setting;
  Tuning tuning{};

  std::unique_ptr<MappedPages> pages;  // a HostState for each rank
  std::unique_ptr<PeerMemory> memory, staging;
  std::unique_ptr<MulticastWindow> window;  // only where nvls was asked for
  std::unique_ptr<SegmentBoard> board;      // for kernels that use tensors where they are
  DeviceComm comm{};
  MemoryPtr local;         // a DeviceComm, a Local and PeerTensors
  uint64_t schedules = 0;  // pieces of direct schedules so far
  std::optional<ToldLocations> locations;

  std::mutex calls;  // one at a time puts work into streams
  CallOrder order{device};
  std::unique_ptr<Watchdog> watchdog;  // last: its threads use the rest

 private:
  static uint8_t code(ReduceOp op) { return static_cast<uint8_t>(op); }
  template <class Call>
  Told told(const Call& call, OpSignature what) const {
    what.count = call.count;
    what.dtype = call.dtype;
    return {what, timeoutOf(call.timeout), call.label};
  }
};

template <class Put>
void HostCommunicator::State::dispatch(const Told& told, cudaStream_t stream, Put&& put) {
  const Range range(told.what.kind);
  // Nothing begins while it is captured.
  const Begun call = begin(told, watchdog->isFollowed() && !isCaptured(stream, true));
  try {
    order.follow(stream);
    if (call.start) call.start->set(order.mark(stream));
    put(call.number);
    finish(*call.end, stream);
  } catch (const Error& error) {
    if (call.start) call.start->set(nullptr);
    finishRest(*call.end, stream);
    giveUp(error, told.label);
  }
}

template <class Call>
void HostCommunicator::State::stage(const Call& call, size_t first, std::byte* to, size_t count,
                                    cudaStream_t stream) {
  const size_t width = sizeOf(call.dtype);
  const CopyCall copy{.from = static_cast<const std::byte*>(call.input) + first * width,
                      .to = to,
                      .count = count,
                      .arithmetic = arithmeticOf(call.dtype, call.op, call.factor),
                      .abort = &stateOnDevice(group->rank())->abort,
                      .factor = call.op == ReduceOp::kPremulSum ? call.factor_on_device : nullptr};
  if (copy.count > 0 && (copy.from != copy.to || copy.arithmetic.scale))
    launch(kernelsOf(call.dtype).copy_in, blocksToMove(count * width, facts.multiprocessors), &copy,
           false, stream);
}

}  // namespace ringreduce::cuda
