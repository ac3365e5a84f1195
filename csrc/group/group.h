// A group of ranks that run collectives together: the interface of the core to the layers above.
//
//     auto group = Group::create(store, rank, world_size, options);
//     group->run({AllReduce{data, count, DType::kFloat32, ReduceOp::kSum}});
//     auto receive = group->post({Message::Direction::kReceive, peer, tag, data, count, dtype});
//
// Thread-safe.  All ranks must call the same operations in the same order; otherwise all ranks get
// an Error.  After any Error except kArgument the group has failed for good: destroy it and make a
// new one.  In a forked child every call except destruction is refused.
//
// A group that survives losses (SharedOptions::min_ranks) does so in shared memory within an
// operation (health/arbiter.h), and between hosts by whole operations (group/recovery.h).  It goes
// on after an Error of kind kPeerLost if only that operation lacked data of a lost rank.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "base/executor.h"
#include "bootstrap/options.h"
#include "bootstrap/store.h"
#include "group/epoch.h"
#include "group/operation.h"
#include "group/recovery.h"

namespace ringreduce {

class Group : public std::enable_shared_from_this<Group> {
 public:
  // Collective over options.members.  Returns when they have joined, on one host or several.
  // Throws Error.  A group that survives losses between hosts uses the store after each loss.
  static std::shared_ptr<Group> create(std::shared_ptr<Store> store, int rank, int world_size,
                                       const GroupOptions& options);
  // The same with a store that outlives the group.
  static std::shared_ptr<Group> create(Store& store, int rank, int world_size,
                                       const GroupOptions& options) {
    return create(std::shared_ptr<Store>(std::shared_ptr<Store>(), &store), rank, world_size,
                  options);
  }
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Calls name ranks by these numbers, whichever of them are members.
  int rank() const { return rank_; }
  int size() const { return size_; }
  Nanos timeout() const { return timeout_; }
  void setTimeout(Nanos timeout) { timeout_ = timeout; }

  // Blocks until the operation is done; throws its Error.
  void run(Operation operation);

  // Runs the operations in order in this thread, as `run` does, if none is queued or running.
  // Returns false otherwise.
  bool tryRunHere(const std::vector<Operation>& operations);

  // Queues the operations, to run in order until one fails.  Throws Error(kArgument) at once for
  // invalid arguments; the handle holds any other error.  `completion` is called once, in a thread
  // that may call this group.
  std::shared_ptr<OperationHandle> submitAll(std::vector<Operation> operations,
                                             Executor::Completion completion);

  std::shared_ptr<OperationHandle> submit(Operation operation, Executor::Completion completion);

  // Starts a send or a receive.  It may complete at once; `await` waits for it.
  std::shared_ptr<Delivery> post(Message message);

  // Waits for a handle of this group.  Returns false after `longest`.  Ctrl-C fails the group.
  // Without a limit, a queued operation runs in this thread if no other runs it.
  bool await(OperationHandle& handle, Nanos longest);
  bool await(Delivery& delivery, Nanos longest);
  // Starts the deadline of a message that is waited for without `await`: by a Future of torch.
  void expect(Delivery& delivery);

  // Starts what is queued soon, for a thread that waits without `await`.
  void hurry();

  // Waits until all queued operations have ended and their completions have been called.
  void drain();

  // Whether no operation is queued or runs, and no message waits to be sent or received.
  bool isIdle() const;

  // Makes the running operation and all later ones fail, on all ranks; those of `local` as well.
  void abort(const std::string& why);

  // ---- for waits for other ranks outside operations: on sockets, on a GPU.  From any thread,
  // except `interrupt`, whether or not an operation runs.  Not of a group that recovers, except
  // checkHealth, liveRanks and interrupt.

  // Throws the group's error if it has failed.
  void checkHealth() const;
  // The state of each rank.  Data of a rank that ended is in memory by now, so look for it once
  // more before you report that rank as lost.
  std::vector<PeerState> states() const;
  // Whether that rank is lost and the kernels of its GPUs do not run any more either.
  bool hasExited(int rank) const;
  // Fails the group for all ranks, unless it has failed already, and throws its error.  `kind` is a
  // failure of a group or kSetup; `culprit` is the rank to blame; `text` says what happened.
  [[noreturn]] void fail(Failure kind, int culprit, const std::string& text);
  // The ranks that operations include, in the order in which hosts() and ring() number them.
  std::vector<int> members() const;
  // Those of them that are not lost: all, if the group does not survive losses.
  std::vector<int> liveRanks() const;
  // Why a rank is lost: "its process ended".
  std::string howLost(int rank) const { return epoch()->arbiter->peers().howLost(rank); }
  // The same as `fail` for a lost rank: "rank 2 (pid 7 on host a) is lost: its process
  // ended <when>".
  [[noreturn]] void failLost(int rank, const std::string& when);
  // Other ranks whose processes are stopped (SIGSTOP, a debugger).
  std::vector<int> stopped() const;
  // "rank 2 (pid 7 on host a)", and the same with the last operation seen of each rank.
  std::string who(int rank) const { return epoch()->arbiter->peers().who(rank); }
  std::string whereabouts(const std::vector<int>& ranks) const {
    return epoch()->arbiter->peers().whereabouts(ranks);
  }
  // Lets Ctrl-C end a wait in a user's thread: aborts the group as "interrupted <doing>" and throws
  // the interrupt's exception.
  void interrupt(const std::string& doing);
  const GroupOptions& options() const { return options_; }

  // ---- the progress of GPU streams, where ranks do not share memory

  // The progress that other ranks receive when they ask.
  void publishStreams(const StreamProgress& own) { epoch()->arbiter->publishStreams(own); }
  // The latest progress of that rank, and its time (0: never).
  std::pair<StreamProgress, Nanos> streamsOf(int rank) const {
    return epoch()->arbiter->peers().streamsOf(rank);
  }
  // Asks all ranks for their progress, without waiting; see Control::askForProgress.  `at_once`:
  // also if they have just been asked, and ranks with nothing new do not answer again.
  void askForStreams(bool at_once);

  // Runs queued operations, sends posted messages, leaves the group and ends its threads; then does
  // the same with `local`.  Further calls are refused.
  void shutdown();

  // Which rank is on which host; null if all ranks share memory.
  std::shared_ptr<const Hosts> hosts() const;
  // The order of rings between hosts; null likewise.
  std::shared_ptr<const HostRing> ring() const;
  // The cost model of the wires between hosts.
  WireCost wireCost() const;
  // The group of this host's ranks, even of one, if there are several hosts and the group does not
  // survive losses; else null.
  const std::shared_ptr<Group>& local() const { return local_; }
  // How each rank on another host is reached, one line each.
  std::vector<std::string> routes() const;

  // Whether collectives use tensors in place that all ranks have in shared blocks.
  bool usesTensorsInPlace() const;

  bool failed() const { return failure() != Failure::kNone; }
  // Whether an operation has ended with an Error.  Set before the operation completes.
  bool hasRaised() const { return raised_; }
  Failure failure() const;                            // kNone if it has not failed
  uint64_t operations() const { return submitted_; }  // the sequence number of the next one
  size_t stagingBytes() const;
  // Bytes that collectives have written to sockets; 0 inside a host.
  uint64_t bytesSent() const;
  const SharedOptions& sharedOptions() const { return shared_; }

 private:
  // `store`: of a group that recovers.
  Group(int rank, int size, const GroupOptions& options, std::unique_ptr<Executor> executor,
        std::shared_ptr<Epoch> epoch, std::shared_ptr<Group> local,
        const std::shared_ptr<Store>& store);
  std::shared_ptr<Epoch> epoch() const;
  std::shared_ptr<Epoch> epochOf(const Delivery& delivery) const;
  void refuseInChild() const;
  void refuseInside() const;
  void check(const std::vector<Operation>& operations) const;
  void execute(const Operation& operation, bool in_users_thread);
  Operation inEpoch(const Operation& operation) const;
  Error lacks(const Operation& operation, int rank) const;
  Facts facts(int rank, bool is_final) const;
  std::string howAbsent(int rank) const;
  std::string textOf(const Operation& operation) const;
  void leave(void (*poll)());

  // ---- of a group that recovers
  void executeWhole(const Operation& operation, Nanos timeout, bool in_users_thread);
  void runWhole(const Operation& operation, Standing& standing, Nanos timeout,
                bool in_users_thread);
  void keepInputs(const Overwritten& inputs);
  bool recover(const Error& loss, Standing& standing, const Operation& operation, Nanos timeout,
               bool in_users_thread);
  bool makeNextEpoch(const Recovery::Watch& watch, Nanos timeout, bool in_users_thread,
                     int& fruitless);
  void enter(const std::shared_ptr<Epoch>& next);
  std::vector<std::shared_ptr<Epoch>> epochs() const;
  Recovery::Sight look(int rank) const;
  bool isCut(int rank) const;
  bool isStopped(int rank) const;
  Error tooFew(const std::vector<int>& before) const;
  void tell(const Error& error);
  std::string ownName() const;
  void noteLosses(const std::vector<int>& before, const std::string& operation);
  Error end(const Error& error);

  const int rank_, size_;
  const GroupOptions options_;
  const int generation_;  // number of forks before it was made
  std::atomic<Nanos> timeout_;
  const SharedOptions shared_;
  const std::shared_ptr<Group> local_;
  std::atomic<bool> raised_{false};
  std::atomic<uint64_t> submitted_{0};
  uint64_t sequence_ = 0;  // operations so far; guarded by the executor's token
  std::unique_ptr<Executor> executor_;

  mutable std::mutex epoch_mutex_;  // guards the next ones
  std::shared_ptr<Epoch> epoch_;
  // During a recovery: made after `epoch_`, which one of them will replace.
  std::vector<std::shared_ptr<Epoch>> tried_;
  std::set<int> sent_to_, sent_earlier_;  // ranks: messages of this epoch, and of those before
  std::optional<Error> ended_;            // why a recovery has failed
  std::string aborted_;                   // why this rank has ended it
  std::map<int, std::string> absent_;     // "rank 2 (pid 7 on host a) is lost: its process ended"
  std::unique_ptr<Recovery> recovery_;    // null if the group does not recover
  std::unique_ptr<std::byte[]> inputs_;   // of the running operation
  std::atomic<size_t> inputs_bytes_ = 0;
};

}  // namespace ringreduce
