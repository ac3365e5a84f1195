// The backend "ringreduce" of torch.distributed.
//
// Torch's argument lists become the core's operations; the core does everything else.  What this
// backend does not have yet says so, and who has it.
#pragma once

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "group/group.h"
#include "torch/work.h"

namespace ringreduce {

class Backend final : public c10d::Backend {
 public:
  Backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
          const GroupOptions& options);
  ~Backend() override;

  const std::string getBackendName() const override { return "ringreduce"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override;

  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  WorkPtr allreduce(Tensors&, const c10d::AllreduceOptions&) override;
  WorkPtr broadcast(Tensors&, const c10d::BroadcastOptions&) override;
  WorkPtr allgather(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override;
  WorkPtr _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override;
  WorkPtr barrier(const c10d::BarrierOptions&) override;

  // The average over all ranks, in place, of one DDP bucket; `context` names it in errors.
  c10::intrusive_ptr<c10::ivalue::Future> averageBucket(const at::Tensor& bucket, Context context);

  void setSequenceNumberForGroup() override {}  // both ends count from the start
  uint64_t getSequenceNumberForGroup() override { return group_->operations(); }
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  // Runs what every living group of this process has queued, and leaves them all: for a process
  // that ends without having destroyed its groups.
  static void shutdownAll();

  bool hasFailed() const { return group_->failed(); }
  size_t stagingBytes() const { return group_->stagingBytes(); }

  // Not there yet.
  WorkPtr allreduce_sparse(Tensors&, const c10d::AllreduceOptions&) override;
  WorkPtr allreduce_coalesced(Tensors&, const c10d::AllreduceCoalescedOptions&) override;
  WorkPtr reduce(Tensors&, const c10d::ReduceOptions&) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>&, Tensors&,
                              const c10d::AllgatherOptions&) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors&, Tensors&,
                                          const c10d::AllgatherOptions&) override;
  WorkPtr gather(std::vector<Tensors>&, Tensors&, const c10d::GatherOptions&) override;
  WorkPtr scatter(Tensors&, std::vector<Tensors>&, const c10d::ScatterOptions&) override;
  WorkPtr reduce_scatter(Tensors&, std::vector<Tensors>&,
                         const c10d::ReduceScatterOptions&) override;
  WorkPtr _reduce_scatter_base(at::Tensor&, at::Tensor&,
                               const c10d::ReduceScatterOptions&) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors&, Tensors&,
                                          const c10d::ReduceScatterOptions&) override;
  WorkPtr alltoall_base(at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&,
                        const c10d::AllToAllOptions&) override;
  WorkPtr alltoall(Tensors&, Tensors&, const c10d::AllToAllOptions&) override;
  WorkPtr send(Tensors&, int, int) override;
  WorkPtr recv(Tensors&, int, int) override;
  WorkPtr recvAnysource(Tensors&, int) override;
  void monitoredBarrier(const c10d::BarrierOptions&, bool) override;

 private:
  std::shared_ptr<Group> group_;
};

// The ringreduce backend behind a torch backend object; throws if it is another one.
Backend& asRingreduce(c10d::Backend& backend);

}  // namespace ringreduce
