// Collectives between GPUs of one host, over a Group of the same ranks.
//
//     auto c = HostCommunicator::create(group, device, options);      // collective
//     c->allReduce({input, output, count, DType::kFloat32, ReduceOp::kSum}, stream);
//     c->wait();                                                  // or c->check(), at any time
//
// gpu_tuning.h chooses the algorithm of a call.  Ranks whose kernels cannot run at the same time
// (processes that share a GPU without MPS) take the direct schedule (direct_schedule.h).
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
  Choice algorithm = Choice::kAuto;    // rank 0's holds for all
  std::optional<MemoryAccess> access;  // to peers' memory; unset: the best possible
  // Kernels of ranks that share a GPU run at once: all in one process, by allReduceTogether.
  bool together = false;
  // Ranks on this rank's GPU, if there are more than those of the group.
  int ranks_on_device = 1;
  // Whether peers map own memory; the same on all ranks.
  bool maps_tensors = true;
  // This rank's: also memory that an allocator maps piece by piece (memory/expandable_memory.h).
  bool maps_pieces = false;

  static CommunicatorOptions fromEnvironment();  // throws Error(kArgument)
};

class HostCommunicator final : public GpuCommunicator {
 public:
  // Collective.  Throws Error, the same on all ranks.
  static std::shared_ptr<HostCommunicator> create(std::shared_ptr<Group> group, int device,
                                                  const CommunicatorOptions& options);
  ~HostCommunicator() override;
  HostCommunicator(const HostCommunicator&) = delete;
  HostCommunicator& operator=(const HostCommunicator&) = delete;

  int rank() const;
  int size() const;

  bool performs(Kind kind) const override;
  void allReduce(const GpuAllReduce& call, CUstream_st* stream) override;
  void reduceScatter(const GpuReduceScatter& call, CUstream_st* stream) override;
  void allGather(const GpuAllGather& call, CUstream_st* stream) override;
  void broadcast(const GpuBroadcast& call, CUstream_st* stream) override;

  // The same for all ranks of a group, in one process and on one device, as one cooperative grid:
  // calls[i] is of ranks[i].  Made with options.together.
  static void allReduceTogether(std::span<HostCommunicator* const> ranks,
                                std::span<const GpuAllReduce> calls, CUstream_st* stream);

  bool usesOwnMemory(size_t bytes) const override;
  bool isMapped(const void* data, size_t bytes) const override;

  std::shared_ptr<Local> local() const override;
  void check() override;
  bool wait(Nanos longest = kNever) override;
  void abort(const std::string& why) override;

  size_t bytes() const override;
  std::vector<OpRecord> records(uint64_t since) const override;
  void addTo(Totals& totals) const override;
  const Tuning& tuning() const;
  const Device& device() const;
  MemoryAccess access() const;    // to peers' memory
  bool kernelsRunAtOnce() const;  // if not, the direct schedule is taken
  // The algorithm of a call of so many bytes: never kAuto.
  Choice chosen(size_t count, DType dtype) const;

 private:
  struct State;
  explicit HostCommunicator(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace ringreduce::cuda
