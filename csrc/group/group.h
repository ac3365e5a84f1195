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
// A group that survives losses (SharedOptions::on_loss) does so in shared memory within an
// operation (health/arbiter.h), and between hosts by whole operations (survival/survivors.h).  It
// goes on after an Error of kind kPeerLost if only that operation lacked data of a lost rank.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/executor.h"
#include "bootstrap/options.h"
#include "bootstrap/store.h"
#include "epoch/epoch.h"
#include "epoch/operation.h"
#include "epoch/recorder.h"
#include "survival/epochs.h"
#include "survival/survivors.h"

namespace ringreduce {

class Group : public std::enable_shared_from_this<Group> {
 public:
  // Collective over options.members.  Returns when they have joined, on one host or several.
  // Throws Error.  A group that survives losses between hosts uses the store after each loss.
  // `made`: of a group that follows another one (survival/successor.h): called with it before the
  // barrier that shows that all members have made it.
  using Made = std::function<void(const std::shared_ptr<Group>&)>;
  static std::shared_ptr<Group> create(std::shared_ptr<Store> store, int rank, int world_size,
                                       const GroupOptions& options, const Made& made = nullptr);
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
  // Of an operation that has none of its own (Arbiter::begin and poll), and of a message
  // (p2p/messenger.cc).  That of making a group is in bootstrap/attempt.h.
  Nanos timeout() const { return timeout_; }
  void setTimeout(Nanos timeout) { timeout_ = timeout; }

  // Blocks until the operation is done; throws its Error.
  void run(Operation operation);

  // Runs the operations in order in this thread, as `run` does, if none is queued or running.
  // Returns false otherwise.
  // `ended`: gets when the last one ended, in CLOCK_MONOTONIC.
  bool tryRunHere(const std::vector<Operation>& operations, Nanos* ended = nullptr);

  // Queues the operations, to run in order until one fails.  Throws Error(kArgument) at once for
  // invalid arguments; the handle holds any other error.  `completion` is called once, in a thread
  // that may call this group.
  std::shared_ptr<OperationHandle> submitAll(std::vector<Operation> operations,
                                             Executor::Completion completion);

  std::shared_ptr<OperationHandle> submit(Operation operation, Executor::Completion completion);

  // Starts a send or a receive.  It may complete at once; `await` waits for it.
  std::shared_ptr<Delivery> post(Message message);

  // Keeps what owns a message's buffer until the message is over.
  void keep(Delivery& delivery, std::shared_ptr<void> memory);

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

  // Throws the group's error if it has failed.  From any thread.
  void checkHealth() const;
  bool failed() const { return failure() != Failure::kNone; }
  Failure failure() const { return epochs_->failure(); }  // kNone if it has not failed
  // Whether an operation has ended with an Error.  Set before the operation completes.
  bool hasRaised() const { return raised_; }
  // Lets Ctrl-C end a wait in a user's thread: aborts the group as "interrupted <doing>" and throws
  // the interrupt's exception.
  void interrupt(const std::string& doing);

  // The ranks that operations include and what connects them, for waits outside operations: on
  // sockets, on a GPU.  From any thread, whether or not an operation runs.  The epoch numbers ranks
  // by their positions, which are their numbers here if the group does not survive losses.  A
  // failure ends the group then; else only the epoch.  The group must outlive the epoch.
  std::shared_ptr<Epoch> epoch() const;
  // The ranks that operations include and that are not lost; all, if it does not survive losses.
  std::vector<int> liveRanks() const;
  // The group of this host's ranks, even of one, if there are several hosts and the group does not
  // survive losses; else null.
  const std::shared_ptr<Group>& local() const { return local_; }

  // Runs queued operations, sends posted messages, leaves the group and ends its threads; then does
  // the same with `local`.  Further calls are refused.
  void shutdown();

  const GroupOptions& options() const { return options_; }
  // Of the ranks that made it: the same on all of them, and of no other group.
  const std::string& meeting() const { return meeting_; }
  const SharedOptions& sharedOptions() const { return shared_; }
  uint64_t operations() const { return submitted_; }  // the sequence number of the next one
  size_t stagingBytes() const;
  // From any thread.
  const Recorder& recorder() const { return recorder_; }
  const Recorder& messages() const { return messages_; }
  // The records of operations that wait for earlier ones of this rank.
  std::vector<OpRecord> queued() const;
  // The same of messages that are not over.
  std::vector<OpRecord> pendingMessages() const;

  std::atomic<int> gpu_communicators{0};  // one for each GPU that this rank has used, for errors

 private:
  Group(int rank, int size, const GroupOptions& options, std::unique_ptr<Executor> executor,
        std::shared_ptr<Epoch> epoch, std::shared_ptr<Group> local,
        const std::shared_ptr<Store>& store);
  void refuseInChild() const;
  // Before a wait for other ranks.  In a signal handler: returns when the operation that it
  // interrupted is over (base/aside.h).
  void stepOutside() const;
  void check(const std::vector<Operation>& operations) const;
  // Returns when it ended.
  Nanos execute(const Operation& operation, bool in_users_thread);
  OpRecord nextRecord(const Operation& operation);
  std::vector<int> shownRanks() const;
  struct Queued;
  void leave(void (*poll)());
  Nanos blockedSince(bool in_users_thread) const;

  const int rank_, size_;
  const GroupOptions options_;
  const int generation_;  // number of forks before it was made
  const std::string meeting_;
  std::atomic<Nanos> timeout_;
  const SharedOptions shared_;
  const bool in_memory_;  // all ranks share it
  const std::shared_ptr<Group> local_;
  std::atomic<bool> raised_{false};
  std::atomic<uint64_t> submitted_{0};
  // The next four are guarded by the executor's token.
  uint64_t sequence_ = 0;  // operations so far
  uint32_t step_ = 0, bucket_ = 0;
  Recorder recorder_{shownRanks(), !in_memory_};

  // How many threads wait for operations that the worker runs, and since when.  If torch has asked
  // for a Future, a thread may wait for that, unseen by this group.
  std::atomic<int> waiting_{0};
  std::atomic<Nanos> waiting_since_{0};
  std::atomic<bool> has_futures_{false};

  mutable std::mutex queue_mutex_;
  uint64_t queue_order_ = 0;
  std::map<uint64_t, OpRecord> queued_;  // by that order
  Recorder messages_{Recorder::OfMessages{}, recorder_};
  std::unique_ptr<Executor> executor_;
  std::unique_ptr<Epochs> epochs_;
  std::unique_ptr<Survivors> survivors_;  // null if a loss between hosts fails the group
};

}  // namespace ringreduce
