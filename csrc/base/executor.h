// In which thread and in which order a group's operations run.
//
// They run one at a time, in the order of the calls.  A blocking call with nothing before it runs
// in the caller's own thread (`tryRunHere`): a hand-off costs more than a small all-reduce.
// Everything else queues for one worker thread, which starts with the first queued operation.
// Completions are told by a third thread, so that a callback which itself waits for an operation
// cannot stop the worker; and while a callback takes long, by another, since it may wait for a
// Future (torch's PowerSGD hook does).  They are told in order but for that.  No thread outlives
// the executor, but where a callback destroys it: then they end by themselves right afterwards.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "base/fd.h"

namespace ringreduce {

// How an operation ended, once it has.
class OperationHandle {
 public:
  // Called once, with the operation's error, in a thread where it may call the group.
  using Completion = std::function<void(std::exception_ptr)>;

  virtual ~OperationHandle() = default;
  bool isDone() const;
  // Waits; `turn`, if not null, is called every few milliseconds and may throw to end the wait.
  // False if `longest` nanoseconds went by first.  Does not throw the operation's error.  In a
  // forked child, where nobody would finish it, throws Error(kArgument).
  bool wait(int64_t longest, void (*turn)());
  std::exception_ptr error() const;  // null while not done, or when all went well
  // False, and nothing will be called, if it is done already.  There is one at most.
  bool setCompletion(Completion completion);
  // Returns the completion that is to be called now.
  Completion finish(std::exception_ptr error);
  void refuseInChild() const;

 private:
  const int generation_ = forkGeneration();
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::exception_ptr error_;
  Completion completion_;
};

class Executor {
 public:
  // What runs: told whether it runs in a user's thread.
  using Work = std::function<void(bool in_users_thread)>;
  using Completion = OperationHandle::Completion;

  Executor();
  ~Executor();  // waits for what is queued, then for the threads

  // Whether an operation runs in this very thread: then the caller is a signal handler, or
  // something else that a wait has let in, and must not wait for another operation.
  bool runsInThisThread() const;

  // Runs `work` in this thread if nothing is queued or running, and throws what it throws.  Returns
  // false, with nothing done, if something is.
  template <class F>
  bool tryRunHere(F&& work) {
    if (!takeToken()) return false;
    const Token token(*this);
    work();
    return true;
  }

  // Queues `work`.  The ticket is finished right after it, `completion` (if any) called later.
  std::shared_ptr<OperationHandle> submit(Work work, Completion completion);

  // Calls `completion` later, where those of queued operations are called.
  void tell(Completion completion, std::exception_ptr error);

  // Waits until all that was queued has run and its completions were told.
  void drain(void (*turn)());

  // Waits until all that is queued has run and all completions were told, and ends the threads.
  // What is submitted later is refused with Error(kAborted).  Called from a completion, it waits
  // for no completions.  `turn`, if not null, is called now and then while it waits, and may throw:
  // then the executor still runs.
  void stop(void (*turn)() = nullptr);

 private:
  struct State;
  struct Token {
    explicit Token(Executor& e) : executor(e) {}
    ~Token() { executor.returnToken(); }
    Executor& executor;
  };
  bool takeToken();
  void startThreads();
  void returnToken();

  std::shared_ptr<State> state_;  // shared with the threads, one of which may outlive this object
};

}  // namespace ringreduce
