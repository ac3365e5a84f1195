// All-reduce between GPUs of several hosts: the communicator of a group that spans them.
//
//     auto group = Group::create(store, rank, world_size, options);   // over several hosts
//     auto local = HostCommunicator::create(group->local(), device, ...);
//     auto all = InterNodeCommunicator::create(group, *group->epoch()->hosts, group->local(),
//     local, device);
//
// If all hosts hold the same number L > 1 of ranks, a message is summed inside each host first, so
// that each rank has a part of it; then between the hosts, each rank's part by a ring of its own, a
// rail; and then gathered inside the hosts.  Each rank then sends 1/L as much between hosts as in
// one ring over all ranks.  It adds in an order of its own: inside hosts first, where halves are
// rounded once more.  Small messages are summed whole inside each host and go whole along every
// rail, which saves a step.
//
// Otherwise one ring goes over all ranks, in their order, and gives the bits of the core's ring.
//
// It performs all_reduce only.  The watchdog (watchdog.h) detects failures.  CUDA graphs may
// capture it, as NCCL's own calls; a replay then has no deadline.
#pragma once

#include <memory>
#include <string>

#include "base/clock.h"
#include "bootstrap/topology.h"
#include "cuda/communicator/gpu_communicator.h"
#include "group/group.h"

namespace ringreduce::cuda {

class InterNodeCommunicator final : public GpuCommunicator {
 public:
  // Collective over all ranks of `group`.  `local` is the communicator of `host_group`, which holds
  // the ranks of this host.  Throws Error.
  static std::shared_ptr<InterNodeCommunicator> create(std::shared_ptr<Group> group,
                                                       const Hosts& hosts,
                                                       std::shared_ptr<Group> host_group,
                                                       std::shared_ptr<GpuCommunicator> local,
                                                       int device);
  ~InterNodeCommunicator() override;
  InterNodeCommunicator(const InterNodeCommunicator&) = delete;
  InterNodeCommunicator& operator=(const InterNodeCommunicator&) = delete;

  // Whether it adds inside hosts first.
  bool hierarchical() const;

  bool performs(Kind kind) const override { return kind == Kind::kAllReduce; }
  bool callsNccl() const override { return true; }
  void allReduce(const GpuAllReduce& call, CUstream_st* stream) override;
  void reduceScatter(const GpuReduceScatter& call, CUstream_st* stream) override;
  void allGather(const GpuAllGather& call, CUstream_st* stream) override;
  void broadcast(const GpuBroadcast& call, CUstream_st* stream) override;

  std::shared_ptr<Local> local() const override;
  void check() override;
  bool wait(Nanos longest = kNever) override;
  void abort(const std::string& why) override;

  size_t bytes() const override;  // the local communicator's too
  std::vector<OpRecord> records(uint64_t since) const override;
  void addTo(Totals& totals) const override;

 private:
  struct State;
  explicit InterNodeCommunicator(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace ringreduce::cuda
