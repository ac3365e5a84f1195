// Collectives between GPUs of one host: a rank's end of them, over a core Group that brings the
// ranks together and knows who is alive.
//
//     auto c = Communicator::create(group, device, options);      // collective
//     c->allReduce({input, output, count, DType::kFloat32, ReduceOp::kSum}, stream);
//     c->wait();                                                  // or c->check(), at any time
//
// A call puts work into a stream and returns.  All ranks make the same calls in the same order;
// calls on several streams of one rank run one after the other (but what a CUDA graph replays is
// the user's to order).  What goes wrong is one of the
// group's four errors, raised by wait, check and the next call; outputs of operations that it hit
// are full of NaN (bytes 0xff).  After an error make a new group.
//
// Which algorithm a call takes is chosen in gpu_tuning.h.  Ranks whose kernels cannot be on their
// GPUs at the same time (processes that share one, without MPS) take the direct schedule
// (direct_schedule.h).
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/dtype.h"
#include "cuda/communicator/gpu_communicator.h"
#include "cuda/gpu_device.h"
#include "cuda/kernels/collective_kernel.h"
#include "cuda/kernels/gpu_tuning.h"
#include "cuda/memory/peer_memory.h"
#include "group/group.h"

namespace ringreduce::cuda {

struct CommunicatorOptions {
  Choice algorithm = Choice::kAuto;  // rank 0's holds for all
  std::optional<MemoryAccess>
      access;  // how peers reach each other's memory; unset: the best there is
  // Kernels of ranks that share a GPU are known to run at once: all in one process, by
  // allReduceTogether.
  bool together = false;

  static CommunicatorOptions fromEnvironment();  // throws Error(kArgument)
};

class Communicator final : public GpuCommunicator {
 public:
  // Collective; takes device memory of bytes() and some pages of the host's.  Throws Error, the
  // same on all ranks.
  static std::shared_ptr<Communicator> create(std::shared_ptr<Group> group, int device,
                                              const CommunicatorOptions& options);
  ~Communicator() override;  // waits for its operations in streams, a few seconds at most
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const;
  int size() const;

  bool performs(Kind kind) const override;
  void allReduce(const GpuAllReduce& call, CUstream_st* stream) override;
  void reduceScatter(const GpuReduceScatter& call, CUstream_st* stream) override;
  void allGather(const GpuAllGather& call, CUstream_st* stream) override;
  void broadcast(const GpuBroadcast& call, CUstream_st* stream) override;

  // The same for all ranks of a group that are of this process and on one device, as one
  // cooperative grid: calls[i] is of ranks[i].  Made with options.together.
  static void allReduceTogether(std::span<Communicator* const> ranks,
                                std::span<const GpuAllReduce> calls, CUstream_st* stream);

  // For the direct schedule, which then needs no copies.
  bool gainsByRegistering() const override;
  std::string registerBuffer(void* data, size_t bytes) override;
  void unregisterBuffer(void* data) override;

  void check() override;
  bool wait(Nanos longest = kNever) override;
  void abort(const std::string& why) override;

  size_t bytes() const override;
  const Tuning& tuning() const;
  const Device& device() const;
  MemoryAccess access() const;    // how peers' memory is reached
  int ranksOnDevice() const;      // of this group, on this rank's GPU
  bool kernelsRunAtOnce() const;  // if not, the direct schedule is taken
  // The algorithm of a call of so many bytes: never kAuto.
  Choice chosen(size_t count, DType dtype) const;

 private:
  struct State;
  explicit Communicator(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace ringreduce::cuda
