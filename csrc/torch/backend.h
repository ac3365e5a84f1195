// The backend "ringreduce" of torch.distributed.
//
// Torch's argument lists become the core's operations; the core does everything else.
#pragma once

#include <c10/core/Allocator.h>
#include <torch/version.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <unordered_map>
#include <variant>
#include <vector>

#include "bootstrap/attempt.h"
#include "bootstrap/topology.h"
#include "bootstrap/unix_socket.h"
#include "cuda/communicator/gpu_communicator.h"
#include "group/group.h"
#include "kernels/message.h"
#include "torch/torch_calls.h"
#include "torch/work.h"

namespace ringreduce {

class Buffers;
class Compression;
class GpuBackend;

// A caller's pg_options: ringreduce.Options.  What is not set comes from the environment, or from
// the group that another is made of.
struct Settings final : c10d::Backend::Options {
  Settings() : c10d::Backend::Options("ringreduce") {}
  // Overrides a method that torch has since 2.15.
  c10::intrusive_ptr<c10d::Backend::Options> clone() const;
  // These with what is set here, of a group of that size.
  SharedOptions over(SharedOptions shared, int size) const;
  bool setsShared() const { return algorithm || slot_bytes || slots || on_loss || order; }
  // Sets what is in force.
  void take(const SharedOptions& shared);

  std::optional<std::string> algorithm;
  std::optional<size_t> slot_bytes;
  std::optional<int> slots;
  std::optional<std::string> on_loss;
  std::optional<int> min_ranks;
  std::optional<double> stall_seconds;
  std::optional<std::string> order;
  std::variant<bool, std::string> join = "auto";  // ringreduce/core/joining.py
};

class Backend final : public c10d::Backend {
 public:
  using StorePtr = c10::intrusive_ptr<c10d::Store>;
  // Makes the backend that takes calls on CUDA tensors which the GPU communicator does not perform;
  // null: they go through the host's memory.
  using MakeInner = std::function<c10::intrusive_ptr<c10d::Backend>(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, int size)>;
  // The facts of its GPUs that a rank gives the others, and what it makes of all facts.
  struct Gpus {
    std::string facts;  // in the store, behind "ringreduce/gpus/" and the rank
    MakeInner make_inner;
    // How many ranks of the job, at least, share this rank's GPU; 1 if a group of `size` ranks is
    // all of the job, or the others have told nothing.
    std::function<int(int size)> count_ranks;
  };

  // The shared options of a group of that size, which rank 0 hands to the others.
  using ChooseShared = std::function<SharedOptions(int size)>;

  // When the group is made: now, by reconfigure(), or by prepare() as one rank of a group that
  // runs.
  enum class Connect { kNow, kByReconfigure, kByPrepare };

  // `settings`: the caller's.  `choose_shared`: for this group and for those that replace it; null:
  // `options` or the environment decide.  `keeps_store`: its store outlives it, see store_keeper.h.
  Backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
          const GroupOptions& options, const Settings& settings, Gpus gpus,
          Connect connect = Connect::kNow, ChooseShared choose_shared = nullptr,
          bool keeps_store = false);
  ~Backend() override;

  const std::string getBackendName() const override { return "ringreduce"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;

  // ---- collectives and messages (reduction_calls.cc, moving_calls.cc)
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  RINGREDUCE_DECLARE_CALLS
  // all_reduce for torch.ops.ringreduce (ops.cc), blocking.  It makes no Work, unless torch's
  // profiler or hooks observe it.
  void runAllReduce(const at::Tensor& tensor, const c10d::AllreduceOptions& options);
  // Overrides a method that torch has since 2.14.
  WorkPtr gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions&);
  void monitoredBarrier(const c10d::BarrierOptions&, bool wait_all_ranks) override;

  // The average over all ranks, in place, of one DDP bucket whose parameters have these
  // `borders` (bordersOf); `context` names it in errors.
  BucketAverage averageBucket(const at::Tensor& bucket, uint64_t borders, Context context);

  // ---- compressed (reduction_calls.cc)
  // Of float32 tensors; `error` receives the errors of this rank's encodings.
  WorkPtr compressedAllReduce(const at::Tensor& input, const at::Tensor& output,
                              const std::optional<at::Tensor>& error, const Coding& coding,
                              ReduceOp op, CodedSchedule schedule, bool async);
  // As averageBucket, of parameters that lie in the bucket as `parts` says; `last` of a step.
  BucketAverage averageBucket(const at::Tensor& bucket, Compression& compression,
                              std::vector<Part> parts, bool last, Context context);

  // ---- the group itself
  // Calls between these two are started as they come, and waited for as one.
  bool supportsCoalescing() const override { return gpu_ != nullptr; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
  using OptionsPtr = c10::intrusive_ptr<Options>;
  void eagerConnectSingleDevice(at::Device device) override;
  bool supportsSplitting() const override { return true; }
  bool supportsShrinking() const override { return true; }
  // A group of some of the ranks, in this order; null for a rank that is not among them.  All of
  // them must call it.  These three meet in a store: the given one, or this group's.
  BackendPtr split(const c10::intrusive_ptr<c10d::Store>&, const std::vector<int>& ranks,
                   const OptionsPtr&) override;
  BackendPtr merge(const c10::intrusive_ptr<c10d::Store>&, const OptionsPtr&, const int& rank,
                   const int& size) override;
  // A group of all ranks but some, also after this group has failed.
  BackendPtr shrink(const std::vector<int64_t>& excluded, int flags, const OptionsPtr&) override;

#ifdef C10D_BACKEND_HAS_RECONFIGURE
  // ---- membership
  //
  // Ranks and size change in place.  The members of the new group each call reconfigure() with the
  // same fresh uuid and the handles of all of them, and meet in the store that this backend was
  // made with.  A list of handles gives the order of the ranks; of a set, it is the order of the
  // numbers that the ranks were started with.  A handle is valid until the next reconfigure() that
  // succeeds.
  bool supportsReconfigure() const override { return true; }
  c10d::ReconfigureHandle get_reconfigure_handle() const override;
  // Returns once the new group is made and the old one is left, whose unfinished operations it
  // aborts.  If it throws, the old group is as it was: ValueError for handles without this rank's,
  // Error for a uuid that was used before or with other handles, Timeout or PeerLost for ranks that
  // do not come, Aborted where abort(), shutdown() or the end of its process ends it on a rank.
  WorkPtr reconfigure(const c10d::ReconfigureOptions&) override;
#endif
  // ---- newcomers to a group that goes on after losses (ringreduce/elastic.py)
  //
  // The members are some of this backend's ranks, which keep their numbers, as does its size.
  //
  // Makes the group that is to follow this one; collective over `members`, which meet at `place` in
  // the store.  Throws Timeout or PeerLost for those that do not come.
  void prepare(const std::string& place, const std::vector<int>& members, Nanos timeout);
  // Leaves this group for the prepared one.
  void enterPrepared();
  // Leaves the prepared group, if there is one.
  void dropPrepared();
  // Whether a broadcast whose root is lost takes the data of the lowest live rank instead: for data
  // of which each rank has a copy that will do, like what DDP broadcasts in a forward.
  void setRootsMove(bool move) { roots_move_ = move; }
  StorePtr store() const { return group_store_; }  // where its ranks leave the facts of their GPUs
  double timeoutSeconds() const { return std::chrono::duration<double>(options_->timeout).count(); }
  bool isConnected() const;
  // Whether it goes on after losses; a newcomer's does.
  bool goesOn() const;

#ifdef C10D_BACKEND_HAS_HOOKS
  // Overrides a method that torch has since 2.15, whose flight recorder then writes its dump.
  bool supportsAbortHooks() const { return true; }
  // Run before abort(), or when a call first raises the group's failure; once a group.
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override {
    observer_->setAbortHook(id, std::move(hook));
  }
  void unregisterAbortHook(int64_t id) override { observer_->setAbortHook(id, nullptr); }
#endif

  void setSequenceNumberForGroup() override {}  // both ends count from the start
  uint64_t getSequenceNumberForGroup() override;
  void registerOnCompletionHook(
      std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15  // there is no feature macro
  // Not where there are GPUs: no thread learns that a single operation in a stream has ended, and
  // torch then records when operations were issued.
  bool supportsCompletionHooks() const override;
  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override;
  void unregisterCompletionHook(int64_t id) override { observer_->completion_hooks.remove(id); }
#endif
  void waitForPendingWorks() override;
  // Returns once all collectives so far have ended on this rank, as have messages in a GPU's
  // current stream.  Throws the group's error if there is one then.
  void commit();
  // A flag for optimizers on this device: 0, and 1 from a failure of the group on.  On a GPU it is
  // set before a failed call's output can be used.
  at::Tensor foundInf(c10::Device device);
  void enableCollectivesTiming() override { observer_->timing = true; }
  c10d::ErrorType getError() override;
  // Overrides a method that torch has since 2.12.
  std::unordered_map<std::string, uint64_t> getMemoryStats();
  void abort() override;
  // Leaves the group.  Releases its memory, descriptors and threads, even if references to this
  // object remain.
  void shutdown() override;

  // Memory that is aligned to pages, in huge ones where the system has them.  In a group on one
  // host its peers can map it, unless no descriptors are left.  On a GPU: GpuBackend's.  While DDP
  // takes its buckets from here, it gets `size` complex numbers as 2 * `size` real ones, and so
  // does everybody else.
  bool supportsTensorAlloc(c10::DeviceIndex device) override { return device < 0 || gpu_; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  // Of a tensor on a GPU: whether all ranks can use it where it is, by now.
  bool isMapped(const at::Tensor& tensor) const;
  // DDP takes its buckets' memory from there until the group is destroyed, if its peers can map
  // it.  For a default group: torch has one switch for all groups of a process.
  void lendBuckets();
  std::shared_ptr<c10::Allocator> getMemAllocator() override;

  bool hasFailed() const { return failure() != Failure::kNone; }
  // Throws the group's error if it has failed.
  void check() const;
  // Whether it can be left without an abort: nothing is under way.
  bool isIdle() const;
  // Whether shutdown() was called, or abort() since the group was made.
  bool isEnded() const;
  // Whether an operation has ended with an Error.
  bool hasRaised() const;
  size_t stagingBytes() const;
  size_t gpuBytes() const;
  // As GpuBackend::records.
  std::vector<std::vector<OpRecord>> gpuRecords(const std::vector<uint64_t>& since) const;
  // Of the group, then as GpuBackend::totals.
  std::vector<Totals> totals() const;
  std::vector<int> liveRanks() const;
  std::vector<std::string> routes() const;
  // Throws Aborted once the group is destroyed.
  std::shared_ptr<Group> group() const;

 private:
  // Null once the group is destroyed.
  std::shared_ptr<Group> groupIfAny() const;
  using GpuPtr = c10::intrusive_ptr<GpuBackend>;
  GpuPtr gpuIfAny() const;
  Failure failure() const;
  // The part for CUDA tensors if this is one; null for others, which the caller then refuses if
  // they are not the CPU's.
  GpuPtr gpuFor(const at::Tensor& tensor) const;
  GpuPtr gpuFor(const Tensors& tensors) const;
  std::shared_ptr<cuda::GpuCommunicator> makeCommunicatorOn(c10::Device device);
  std::shared_ptr<Group> makeGroup(const StorePtr& store, int rank, int size, GroupOptions options,
                                   const Group::Made& made = nullptr) const;
  c10::intrusive_ptr<GpuBackend> makeGpuBackend(int rank, int size);
  WorkPtr broadcastOfCopies(Group& group, const at::Tensor& tensor,
                            const c10d::BroadcastOptions& options);
  // A group that is to follow this one, its part of the store, and the attempt that made it.
  struct Successor {
    std::shared_ptr<Group> group = nullptr;
    StorePtr store = nullptr;
    std::shared_ptr<Attempt> attempt = nullptr;
  };
  // Makes it by makeGroup, so by makeSuccessor of survival/successor.h: the prepared one.
  // endChange() ends options.attempt; at once if it was called more than `ends` times.  `made`:
  // called before the barrier.  The caller keeps the result until the change is over, for which the
  // end of the process waits.
  std::shared_ptr<Attempt> prepareSuccessor(const StorePtr& store, int rank, int size,
                                            GroupOptions options, int ends,
                                            const std::function<void()>& made = nullptr);
  // Makes the prepared group the current one, and returns that before, as replaceGroup does.
  // `entered`: called with group_mutex_ held.
  std::shared_ptr<Group> enterSuccessor(const GpuPtr& gpu,
                                        const std::function<void()>& entered = nullptr);
  static void drop(const Successor& next);
  // Ends the change that is under way in another thread, and those that begin before the next
  // group, except a reconfigure() that is called later than abort().
  void endChange(const char* why);
  // Makes `group`, which was made in `store`, the current one.  Returns the one before, as it was;
  // null if there was none.  With group_mutex_ held, or in the constructor.
  std::shared_ptr<Group> replaceGroup(std::shared_ptr<Group> group, const GpuPtr& gpu,
                                      const StorePtr& store);
  Job observed(Job job) const;  // by this backend
  // A call takes the group once, and is checked and run with it: another thread may reconfigure
  // this object meanwhile.
  WorkPtr start(Group& group, Job job, bool async);
  WorkPtr start(Group& group, c10d::OpType type, const char* title, Tensors inputs, Tensors outputs,
                Operation operation, bool async);
  WorkPtr startMessage(c10d::OpType type, const char* title, const Tensors& tensors,
                       Message message);
  WorkPtr collected(WorkPtr work);
  c10::intrusive_ptr<c10d::Store> meeting(const char* why, const std::vector<int>& ranks) const;
  BackendPtr derived(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                     GroupOptions made, const OptionsPtr& options) const;
  GroupOptions optionsOfPart(const std::vector<int>& ranks) const;

  const StorePtr store_;
  StorePtr group_store_;  // the part of it for this group, and for groups made of it
  GroupOptions group_options_;
  const c10::intrusive_ptr<Settings> options_;
  const std::shared_ptr<Observer> observer_ = std::make_shared<Observer>();
  const Gpus gpus_;  // handed on to groups made of this one
  const ChooseShared choose_shared_;
  std::atomic<bool> keeps_store_;
  mutable std::mutex group_mutex_;  // of the group, its GPUs and the change of its members
  std::shared_ptr<Group> group_;
  Failure last_failure_ = Failure::kNone;  // of a group that is destroyed
  bool is_connected_ = false;              // it has or had a group, or was destroyed
  const Connect connect_;
  std::mutex change_mutex_;          // one reconfigure() or prepare() at a time; others wait
  std::shared_ptr<Attempt> change_;  // the last of them
  Successor prepared_;
  int ends_ = 0;                      // calls of abort() and shutdown() since the group was made
  const char* end_reason_ = nullptr;  // the last of them
  bool is_destroyed_ = false;         // shutdown() was called
  std::atomic<bool> roots_move_{false};
  std::shared_ptr<void> lends_buckets_;     // torch's switch, while it does
  std::atomic<bool> told_unshared_{false};  // the log has said that a tensor could not be shared
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  const std::string token_ = randomSecretText().substr(0, 16);  // of this backend, in its handles
  std::set<int64_t> used_uuids_;
#endif
  GpuPtr gpu_;  // null in a build without CUDA
  const std::shared_ptr<Buffers> buffers_;

  std::mutex coalescing_mutex_;  // of the next two
  bool coalescing_ = false;
  std::vector<WorkPtr> coalesced_;
};

// The ringreduce backend behind a torch backend object; throws if it is another one.
Backend& asRingreduce(c10d::Backend& backend);

}  // namespace ringreduce
