// Runs the operations of a group: in which thread, and in which order.
//
// They run one at a time, in the order of the calls.  A blocking call with nothing before it runs
// in the caller's own thread (`tryRunHere`): a hand-off costs more than a small all-reduce.
// Everything else queues.  One worker thread takes it from there, or a thread that waits for it,
// whichever comes first.  The worker starts with the first queued operation, and lets an operation
// that is marked as quick wait briefly for its caller: to wake the worker costs more than to run
// it. Completions are called in callback threads, so that a callback that waits for an operation
// does not stop the worker.  While one callback takes long, another thread calls the next, since
// the first may wait for its Future (torch's PowerSGD hook does); apart from that they keep the
// order. Where no further thread can be started, the worker thread calls the completion. No thread
// outlives the executor, unless a callback destroys it: then they end right afterwards.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "base/aside.h"
#include "base/fd.h"

namespace ringreduce {

// A queued operation: whether it is done, and with which error.
class OperationHandle {
 public:
  // Called once, with the operation's error, in a thread where it may call the group.
  using Completion = std::function<void(std::exception_ptr)>;

  virtual ~OperationHandle() = default;
  bool isDone() const;
  // Waits.  `poll`, if not null, is called every few milliseconds and may throw to end the wait.
  // Returns false after `longest` nanoseconds.  Does not throw the operation's error.  In a forked
  // child, where it would never end, throws Error(kArgument).
  bool wait(int64_t longest, void (*poll)());
  std::exception_ptr error() const;  // null while not done, or when all went well
  // Returns false, and will not call it, if the operation is done already.  At most one is set.
  bool setCompletion(Completion completion);
  // Returns the completion to call now, if any.
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
  // An operation.  The argument: whether it runs in a user's thread.
  using Work = std::function<void(bool in_users_thread)>;
  using Completion = OperationHandle::Completion;

  Executor();
  ~Executor();  // waits for queued operations, then for the threads

  // Whether an operation runs in this thread.  Then the caller is a signal handler, or other code
  // that a wait called, and must not wait for another operation before it has stepped aside.
  bool runsInThisThread() const;

  // Runs `work` in this thread, with its exceptions, if nothing is queued or running; else returns
  // false.  Throws also what a signal handler threw after it had stepped aside.
  template <class F>
  bool tryRunHere(F&& work) {
    if (!takeToken()) return false;
    try {
      const Token token(*this);
      work();
    } catch (...) {
      finishAsidesOf(std::current_exception());
    }
    finishAsides();
    return true;
  }

  // Queues `work`.  The handle is finished right after it; `completion`, if any, is called later.
  // `quick`: it takes less time than to wake the worker.
  std::shared_ptr<OperationHandle> submit(Work work, Completion completion, bool quick);

  // Runs queued operations in this thread until the one of `handle` is done, or another thread runs
  // one.  Throws what interrupted an earlier operation (Ctrl-C) if that made this one fail, and
  // what a signal handler threw after it had stepped aside.
  void runUntil(const OperationHandle& handle);

  // Lets the worker take what is queued at once: nobody may come to wait for it.
  void hurry();

  // Calls `completion` in a callback thread, after those that are due.
  void callLater(Completion completion, std::exception_ptr error);

  bool isIdle() const;  // no operation is queued or runs

  // Waits until all queued operations have run and their completions were called.
  void drain(void (*poll)());

  // Waits as `drain`, and ends the threads.  Later submissions are refused with Error(kAborted).
  // Called from a completion, it waits for no completions.  `poll`, if not null, is called now and
  // then while it waits, and may throw: then the executor still runs.
  void stop(void (*poll)() = nullptr);

 private:
  struct State;
  struct Token {
    explicit Token(Executor& e) : executor(e) {}
    ~Token() { executor.returnToken(); }
    Executor& executor;
    const OperationHere here;
  };
  // The rest of the handlers; throws the error of the operation, whatever theirs are.
  [[noreturn]] static void finishAsidesOf(std::exception_ptr error);
  bool takeToken();
  void startThreads();
  void returnToken();

  std::shared_ptr<State> state_;  // shared with the threads, one of which may outlive this object
};

}  // namespace ringreduce
