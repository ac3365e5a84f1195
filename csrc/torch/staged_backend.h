// Calls on tensors of any device, by way of the host's memory: copies there, the CPU backend's call
// on the copies, and copies of the results back.
//
// Slow; used where NCCL cannot start.  A call's inputs are copied before it returns, so it waits
// for what is in the caller's stream; its results come when its Work is waited for (or found to be
// completed), or its Future is, in the stream that is then current.
#pragma once

#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace ringreduce {

class StagedBackend final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  // `cpu` must live as long as this is called.
  explicit StagedBackend(c10d::Backend& cpu)
      : c10d::Backend(cpu.getRank(), cpu.getSize()), cpu_(cpu) {}

  const std::string getBackendName() const override { return "ringreduce"; }

  WorkPtr allreduce(Tensors&, const c10d::AllreduceOptions&) override;
  WorkPtr allreduce_coalesced(Tensors&, const c10d::AllreduceCoalescedOptions&) override;
  WorkPtr allreduce_sparse(Tensors&, const c10d::AllreduceOptions&) override;
  WorkPtr reduce(Tensors&, const c10d::ReduceOptions&) override;
  WorkPtr reduce_scatter(Tensors&, std::vector<Tensors>&,
                         const c10d::ReduceScatterOptions&) override;
  WorkPtr _reduce_scatter_base(at::Tensor&, at::Tensor&,
                               const c10d::ReduceScatterOptions&) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors&, Tensors&,
                                          const c10d::ReduceScatterOptions&) override;
  WorkPtr broadcast(Tensors&, const c10d::BroadcastOptions&) override;
  WorkPtr allgather(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override;
  WorkPtr allgather_coalesced(std::vector<Tensors>&, Tensors&,
                              const c10d::AllgatherOptions&) override;
  WorkPtr _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors&, Tensors&,
                                          const c10d::AllgatherOptions&) override;
  WorkPtr gather(std::vector<Tensors>&, Tensors&, const c10d::GatherOptions&) override;
  WorkPtr scatter(Tensors&, std::vector<Tensors>&, const c10d::ScatterOptions&) override;
  WorkPtr alltoall_base(at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&,
                        const c10d::AllToAllOptions&) override;
  WorkPtr alltoall(Tensors&, Tensors&, const c10d::AllToAllOptions&) override;
  WorkPtr send(Tensors&, int peer, int tag) override;
  WorkPtr recv(Tensors&, int peer, int tag) override;
  WorkPtr recvAnysource(Tensors&, int tag) override;

  // Every call is started by itself, as it comes.
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

 private:
  class Copies;
  template <class Call>
  WorkPtr run(c10d::OpType type, const Copies& copies, Call&& call);

  c10d::Backend& cpu_;
  std::mutex mutex_;  // of the next two
  bool coalescing_ = false;
  std::vector<WorkPtr> works_;
};

}  // namespace ringreduce
