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

#include "group/executor.h"
#include "group/messenger.h"
#include "group/operation.h"
#include "group/options.h"
#include "group/rendezvous.h"
#include "group/session.h"

namespace ringreduce {

class Group : public std::enable_shared_from_this<Group> {
 public:
  // Collective: returns when all ranks have joined.  Throws Error.
  static std::shared_ptr<Group> create(Store& store, int rank, int world_size,
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

  // Makes the operation under way and all later ones fail, on all ranks.
  void abort(const std::string& why);

  // Runs what is queued, sends what is to be sent, leaves the group and ends its threads.  Further
  // calls are refused.
  void shutdown();

  bool failed() const { return session_->failed(); }
  Failure failure() const { return session_->failure(); }  // kNone while all is well
  uint64_t operations() const { return submitted_; }       // so far: the next one's number
  size_t stagingBytes() const { return Layout(membership_.options, size_).bytes; }
  const SharedOptions& sharedOptions() const { return membership_.options; }

 private:
  Group(int rank, Membership membership, const GroupOptions& options);
  void refuseInChild() const;
  void refuseInside() const;
  void check(const std::vector<Operation>& operations) const;
  void execute(const Operation& operation, bool in_users_thread);
  void leave(void (*turn)());

  struct Wires;

  const int rank_, size_;
  const GroupOptions options_;
  const int generation_;  // forks before it was made
  const Patience users_patience_, workers_patience_;
  std::atomic<Nanos> timeout_;
  Membership membership_;
  std::unique_ptr<Session> session_;
  std::unique_ptr<Wires> wires_;
  std::atomic<uint64_t> submitted_{0};
  uint64_t sequence_ = 0;  // of the operation that runs; guarded by the executor's token
  std::once_flag departed_;
  std::unique_ptr<Executor> executor_;  // its threads use all of the above
  std::unique_ptr<Messenger> messenger_;
};

}  // namespace ringreduce
