// A group of ranks that run collectives together: the interface of the core to the layers above.
//
//     auto group = Group::create(store, rank, world_size, options);
//     group->run({AllReduce{data, count, DType::kFloat32, ReduceOp::kSum}});
//     auto receive = group->post({Message::Direction::kReceive, peer, tag, data, count, dtype});
//
// Thread-safe.  All ranks must call the same operations in the same order; otherwise all ranks get
// an Error.  After any Error except kArgument the group has failed for good: destroy it and make a
// new one.  In a forked child every call except destruction is refused.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <utility>

#include "base/executor.h"
#include "bootstrap/membership.h"
#include "bootstrap/options.h"
#include "bootstrap/store.h"
#include "group/operation.h"
#include "health/arbiter.h"
#include "p2p/messenger.h"

namespace ringreduce {

class Hosts;
struct HostRing;
class Network;
class Wires;

class Group : public std::enable_shared_from_this<Group> {
 public:
  // Collective.  Returns when all ranks have joined, on one host or several.  Throws Error.
  static std::shared_ptr<Group> create(Store& store, int rank, int world_size,
                                       const GroupOptions& options);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  // The same as callers count (GroupOptions::members).
  int callersRank() const { return options_.memberAt(rank_); }
  int callersSize() const { return options_.members.empty() ? size_ : options_.members_of; }
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
  bool await(OperationHandle& handle, Nanos longest);
  bool await(Delivery& delivery, Nanos longest);
  // Starts the deadline of a message that is waited for without `await`: by a Future of torch.
  void expect(Delivery& delivery);

  // Waits until all queued operations have ended and their completions have been called.
  void drain();

  // Whether no operation is queued or runs, and no message waits to be sent or received.
  bool isIdle() const;

  // Makes the running operation and all later ones fail, on all ranks; those of `local` as well.
  void abort(const std::string& why);

  // ---- for waits for other ranks outside operations: on sockets, on a GPU.  From any thread,
  // except `interrupt`, whether or not an operation runs.

  // Throws the group's error if it has failed.
  void checkHealth() const;
  // The state of each rank.  Data of a rank that ended is in memory by now, so look for it once
  // more before you report that rank as lost.
  std::vector<PeerState> states() const;
  // Fails the group for all ranks, unless it has failed already, and throws its error.  `kind` is a
  // failure of a group or kSetup; `culprit` is the rank to blame; `text` says what happened.
  [[noreturn]] void fail(Failure kind, int culprit, const std::string& text);
  // The ranks that operations include: all, if the group does not survive losses.
  std::vector<int> liveRanks() const;
  // Why a rank is lost: "its process ended".
  std::string howLost(int rank) const { return arbiter_->howLost(rank); }
  // The same as `fail` for a lost rank: "rank 2 (pid 7 on host a) is lost: its process
  // ended <when>".
  [[noreturn]] void failLost(int rank, const std::string& when);
  // Other ranks whose processes are stopped (SIGSTOP, a debugger).
  std::vector<int> stopped() const;
  // "rank 2 (pid 7 on host a)", and the same with the last operation seen of each rank.
  std::string who(int rank) const { return arbiter_->who(rank); }
  std::string whereabouts(const std::vector<int>& ranks) const {
    return arbiter_->whereabouts(ranks);
  }
  // Lets Ctrl-C end a wait in a user's thread: aborts the group as "interrupted <doing>" and throws
  // the interrupt's exception.
  void interrupt(const std::string& doing);
  const GroupOptions& options() const { return options_; }

  // ---- the progress of GPU streams, where ranks do not share memory

  // The progress that other ranks receive when they ask.
  void publishStreams(const StreamProgress& own) { arbiter_->publishStreams(own); }
  // The latest progress of that rank, and its time (0: never).
  std::pair<StreamProgress, Nanos> streamsOf(int rank) const { return arbiter_->streamsOf(rank); }
  // Asks all ranks for their progress, without waiting; see Control::askForProgress.  `at_once`:
  // also if they have just been asked, and ranks with nothing new do not answer again.
  void askForStreams(bool at_once);

  // Runs queued operations, sends posted messages, leaves the group and ends its threads; then does
  // the same with `local`.  Further calls are refused.
  void shutdown();

  // Which rank is on which host; null if all ranks share memory.
  const Hosts* hosts() const { return hosts_.get(); }
  // The order of rings between hosts; null likewise.
  const HostRing* ring() const;
  // The cost model of the wires between hosts.
  WireCost wireCost() const;
  // The group of this host's ranks, even of one, if there are several hosts; else null.
  const std::shared_ptr<Group>& local() const { return local_; }
  // How each rank on another host is reached, one line each.
  std::vector<std::string> routes() const;

  bool failed() const { return arbiter_->failed(); }
  // Whether an operation has ended with an Error.  Set before the operation completes.
  bool hasRaised() const { return raised_; }
  Failure failure() const { return arbiter_->failure(); }  // kNone if it has not failed
  uint64_t operations() const { return submitted_; }       // the sequence number of the next one
  size_t stagingBytes() const;
  // Bytes that collectives have written to sockets; 0 inside a host.
  uint64_t bytesSent() const;
  const SharedOptions& sharedOptions() const { return shared_; }

 private:
  Group(int rank, Membership membership, const GroupOptions& options);
  Group(int rank, std::unique_ptr<Network> network, Hosts hosts, std::shared_ptr<Group> local,
        Membership local_members, const GroupOptions& options);
  void refuseInChild() const;
  void refuseInside() const;
  void check(const std::vector<Operation>& operations) const;
  void execute(const Operation& operation, bool in_users_thread);
  void leave(void (*poll)());

  struct Closes {
    void operator()(Network* network) const;
  };

  const int rank_, size_;
  const GroupOptions options_;
  const int generation_;  // number of forks before it was made
  const Patience users_patience_, workers_patience_;
  std::atomic<Nanos> timeout_;
  const SharedOptions shared_;
  Membership membership_;  // of ranks that share memory: all, or this host's
  std::unique_ptr<Hosts> hosts_;
  std::unique_ptr<Network> network_;  // to the other ranks
  std::shared_ptr<Group> local_;
  std::unique_ptr<Arbiter> arbiter_;
  std::unique_ptr<Wires> wires_;
  std::unique_ptr<Network, Closes> closed_first_;  // its threads use the arbiter and the wires
  std::atomic<bool> raised_{false};
  std::atomic<uint64_t> submitted_{0};
  uint64_t sequence_ = 0;  // of the running operation; guarded by the executor's token
  std::once_flag departed_;
  std::unique_ptr<Executor> executor_;  // its threads use all of the above
  std::unique_ptr<Messenger> messenger_;
};

}  // namespace ringreduce
