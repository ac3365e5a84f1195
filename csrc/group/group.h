// A group of ranks that run collectives together: what everything above the core uses.
//
//     auto group = Group::create(store, rank, world_size, options);
//     group->run({AllReduce{data, count, DType::kFloat32, ReduceOp::kSum}});
//     auto receive = group->post({Message::Way::kReceive, peer, tag, data, count, dtype});
//
// Thread-safe.  All ranks must call the same operations in the same order; where they do not, all
// get an Error.  After any Error but kArgument the group has failed for good: destroy it, make a
// new one. In a forked child every call but destruction is refused.
#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include "base/executor.h"
#include "bootstrap/options.h"
#include "bootstrap/rendezvous.h"
#include "group/operation.h"
#include "health/session.h"
#include "p2p/messenger.h"

namespace ringreduce {

class Hosts;
struct HostRing;
class Network;
class Wires;

class Group : public std::enable_shared_from_this<Group> {
 public:
  // Collective: returns when all ranks have joined, wherever they are.  Throws Error.
  static std::shared_ptr<Group> create(Store& store, int rank, int world_size,
                                       const GroupOptions& options);
  // The same for the ranks of this host, once all have met.
  static std::shared_ptr<Group> ofHost(const Hosts& hosts, Store& store,
                                       const GroupOptions& options);
  // The same for ranks that are known to be on one host.
  static std::shared_ptr<Group> createTogether(Store& store, int rank, int world_size,
                                               const GroupOptions& options);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  Nanos timeout() const { return timeout_; }
  void setTimeout(Nanos timeout) { timeout_ = timeout; }

  // Blocks until the operation is done; throws its Error.
  void run(Operation operation);

  // Runs them, one after the other, in this thread if nothing is queued or running, like `run`;
  // else returns false.
  bool tryRunHere(const std::vector<Operation>& operations);

  // Queues the operations, to run one after the other until one fails.  Throws Error(kArgument) at
  // once for what cannot be done; any other error is the ticket's.  `completion` is called once, in
  // a thread where it may call this group.
  std::shared_ptr<Ticket> submitAll(std::vector<Operation> operations,
                                    Executor::Completion completion);

  std::shared_ptr<Ticket> submit(Operation operation, Executor::Completion completion);

  // Starts a send or a receive.  It may be over at once; `await` waits for it.
  std::shared_ptr<Delivery> post(Message message);

  // Waits for a ticket of this group; false if `longest` goes by first.  Ctrl-C fails the group.
  bool await(Ticket& ticket, Nanos longest);
  bool await(Delivery& delivery, Nanos longest);
  // Somebody waits for it from now on without a call of `await`: in a Future of torch's.
  void expect(Delivery& delivery);

  // Waits until all operations that were queued are over and their completions were told.
  void drain();

  // Makes the operation under way and all later ones fail, on all ranks; those of `local` as well.
  void abort(const std::string& why);

  // ---- For who waits for other ranks by other means than operations: sockets, a GPU.  All but
  // `interrupt` may be called from any thread, whether or not an operation runs.

  // Throws the group's error if it has failed.
  void checkHealth() const;
  // What has become of each rank.  What one that is gone did before is in memory by now, so look
  // for it once more before calling that rank lost.
  std::vector<Presence> presence() const;
  // Ends the group for all ranks, unless it has ended already, and throws its error.  `kind` is one
  // of the failures of a group, or kSetup; `culprit` the rank to blame; `text` says what happened.
  [[noreturn]] void fail(Failure kind, int culprit, const std::string& text);
  // Of a rank that is kEnded, why: "its process ended".
  std::string howLost(int rank) const;
  // The same as `fail` for a rank that is gone: "rank 2 (pid 7 on host a) is lost: its process
  // ended <when>".
  [[noreturn]] void failLost(int rank, const std::string& when);
  // Ranks whose processes are stopped (SIGSTOP, a debugger), but for this one.
  std::vector<int> stopped() const;
  // "rank 2 (pid 7 on host a)", and the same with what ranks were last seen doing.
  std::string who(int rank) const;
  std::string whereabouts(const std::vector<int>& ranks) const;
  // Lets Ctrl-C end a wait in a user's thread: throws what that throws, after the group was aborted
  // as "interrupted <doing>".
  void interrupt(const std::string& doing);
  const GroupOptions& options() const { return options_; }

  // Runs what is queued, sends what is to be sent, leaves the group and ends its threads, and then
  // does the same with `local`.  Further calls are refused.
  void shutdown();

  // Who is on which host; null for a group that was made together.
  const Hosts* hosts() const { return hosts_.get(); }
  // The order of rings between hosts; null likewise.
  const HostRing* ring() const;
  // What the chooser holds of the wires between hosts.
  WireCost wireCost() const;
  // The group of this host's ranks, be it one alone, where `hosts` are several; else null.
  const std::shared_ptr<Group>& local() const { return local_; }
  // How the ranks of other hosts are reached, for whoever wants to know: a line for each.
  std::vector<std::string> routes() const;

  bool failed() const { return session_->failed(); }
  Failure failure() const { return session_->failure(); }  // kNone while all is well
  uint64_t operations() const { return submitted_; }       // so far: the next one's number
  size_t stagingBytes() const;
  // What collectives have given to sockets so far, for whoever counts; 0 inside a host.
  uint64_t bytesSent() const;
  const SharedOptions& sharedOptions() const { return shared_; }

 private:
  Group(int rank, Membership membership, const GroupOptions& options);
  Group(int rank, std::unique_ptr<Network> network, Hosts hosts, std::shared_ptr<Group> local,
        Membership neighbours, const GroupOptions& options);
  void refuseInChild() const;
  void refuseInside() const;
  void check(const std::vector<Operation>& operations) const;
  void execute(const Operation& operation, bool in_users_thread);
  void leave(void (*turn)());

  struct Closes {
    void operator()(Network* network) const;
  };

  const int rank_, size_;
  const GroupOptions options_;
  const int generation_;  // forks before it was made
  const Patience users_patience_, workers_patience_;
  std::atomic<Nanos> timeout_;
  const SharedOptions shared_;
  Membership membership_;  // of ranks that share memory: all, or this host's
  std::unique_ptr<Hosts> hosts_;
  std::unique_ptr<Network> network_;  // to ranks that do not
  std::shared_ptr<Group> local_;
  std::unique_ptr<Session> session_;
  std::unique_ptr<Wires> wires_;
  std::unique_ptr<Network, Closes> closed_first_;  // whose threads use the session and the wires
  std::atomic<uint64_t> submitted_{0};
  uint64_t sequence_ = 0;  // of the operation that runs; guarded by the executor's token
  std::once_flag departed_;
  std::unique_ptr<Executor> executor_;  // its threads use all of the above
  std::unique_ptr<Messenger> messenger_;
};

}  // namespace ringreduce
