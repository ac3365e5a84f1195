// The queue, the worker and the callback threads.
#include "base/executor.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"

namespace ringreduce {
namespace {

// How long the next completion waits for the one before it, until another thread calls it.
constexpr auto kPatience = std::chrono::milliseconds(1);

// How long a quick operation waits for its caller.  While such operations come, the worker looks
// for them from time to time, so that they need not wake it.  A look takes some 20 us of the
// callers' core, so it looks ever less often while they run them all: the first that its caller
// does not run waits for the longest nap.  After kNaps looks without a quick operation it sleeps.
constexpr Nanos kQuickTime = 50 * kMicrosecond, kFirstNap = 200 * kMicrosecond;
constexpr Nanos kLongestNap = 4 * kFirstNap;
constexpr int kNaps = 10;

}  // namespace

// ---- OperationHandle

bool OperationHandle::isDone() const {
  const std::lock_guard lock(mutex_);
  return done_;
}

void OperationHandle::refuseInChild() const {
  if (forkGeneration() != generation_)
    throw Error(Failure::kArgument, "this operation is the parent process's to wait for");
}

bool OperationHandle::wait(int64_t longest, void (*poll)()) {
  refuseInChild();
  const Nanos deadline = deadlineIn(longest);
  std::unique_lock lock(mutex_);
  while (!done_) {
    const Nanos left = deadline - now();
    if (left <= 0) return false;
    changed_.wait_for(lock, std::chrono::nanoseconds(std::min(left, 50 * kMillisecond)));
    if (!done_ && poll) {
      lock.unlock();
      poll();
      lock.lock();
    }
  }
  return true;
}

std::exception_ptr OperationHandle::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

bool OperationHandle::setCompletion(Completion completion) {
  const std::lock_guard lock(mutex_);
  if (!done_) completion_ = std::move(completion);
  return !done_;
}

OperationHandle::Completion OperationHandle::finish(std::exception_ptr error) {
  Completion completion;
  {
    const std::lock_guard lock(mutex_);
    error_ = std::move(error);
    done_ = true;
    completion.swap(completion_);
  }
  changed_.notify_all();
  return completion;
}

// ---- Executor

struct Executor::State : std::enable_shared_from_this<State> {
  struct Item {
    Work work;
    std::shared_ptr<OperationHandle> handle;
    Nanos due;  // the time from which the worker may take it
  };
  struct Due {
    Completion completion;
    std::exception_ptr error;
  };

  std::mutex mutex;
  std::condition_variable for_worker, for_callbacks, idle;
  std::deque<Item> queue;
  std::deque<Due> due;
  uint64_t taken = 0;                          // completions that were taken from due
  int alive = 0;                               // callback threads
  int calling = 0;                             // callback threads that are in a completion
  bool abandoned = false;                      // the callback threads are detached
  bool short_of_threads = false;               // the last attempt to start one has failed
  std::multiset<std::thread::id> own_callers;  // threads in the completion that they waited for
  bool busy = false;                           // the token: an operation runs
  bool asleep = false;                         // the worker waits to be notified
  bool hurried = false;                        // the worker takes all that is queued at once
  uint64_t quick = 0;                          // submissions of quick operations
  std::thread::id owner;     // the holder of the token, if that is a user's thread
  bool worker_done = false;  // no more completions will come
  bool stopping = false;
  std::thread worker;
  std::vector<std::thread> callback_threads;

  // Exceptions from a completion callback are logged and dropped.
  static void call(const Completion& completion, std::exception_ptr error) {
    try {
      completion(std::move(error));
    } catch (const std::exception& thrown) {
      log(std::string("a callback at the end of an operation failed: ") + thrown.what());
    } catch (...) {
      log("a callback at the end of an operation failed");
    }
  }

  static void name(const char* text) { pthread_setname_np(pthread_self(), text); }

  void work() {
    name("ringreduce");
    std::unique_lock lock(mutex);
    while (awaitItem(lock))
      if (Due next = runFirst(lock, /*in_users_thread=*/false).due; next.completion)
        queueCompletion(std::move(next));
    worker_done = true;
    for_callbacks.notify_all();
  }

  // No callback thread is free for the next completion, and none can be started.
  bool isStuck() const { return short_of_threads && !due.empty() && calling >= alive; }

  // In the worker.  Only once the callback threads had their time: this completion may block it.
  void callStuck(std::unique_lock<std::mutex>& lock) {
    const uint64_t seen = taken;
    const auto is_over = [&] { return !isStuck() || taken != seen; };
    if (for_callbacks.wait_for(lock, kPatience, is_over)) return;
    ensureCallbackThread();
    if (is_over()) return;
    const auto caller = own_callers.insert(std::this_thread::get_id());
    callNext(lock);
    own_callers.erase(caller);
  }

  // Waits until the worker may take the first item.  False if there will be none.
  bool awaitItem(std::unique_lock<std::mutex>& lock) {
    int naps = kNaps;
    Nanos nap = kFirstNap;
    for (uint64_t seen = quick;;) {
      if (std::exchange(seen, quick) != quick) naps = 0;
      if (isStuck()) {
        callStuck(lock);
        continue;
      }
      if (queue.empty()) {
        if (stopping) return false;
        hurried = false;
      }
      if (queue.empty() && naps < kNaps) {
        ++naps;
        for_worker.wait_for(lock, std::chrono::nanoseconds(nap));
        nap = std::min(2 * nap, kLongestNap);
      } else if (queue.empty() || busy) {
        asleep = true;
        for_worker.wait(lock);
        asleep = false;
      } else if (const Nanos left = queue.front().due - now(); left > 0 && !hurried && !stopping) {
        for_worker.wait_for(lock, std::chrono::nanoseconds(left));
      } else {
        return true;
      }
    }
  }

  struct Ended {
    std::shared_ptr<OperationHandle> handle;
    Due due;                   // its completion, which may be null
    bool interrupted = false;  // its error is no Error
  };

  // Runs the first item; the token must be free.
  Ended runFirst(std::unique_lock<std::mutex>& lock, bool in_users_thread) {
    Item item = std::move(queue.front());
    queue.pop_front();
    busy = true;
    if (in_users_thread) owner = std::this_thread::get_id();
    lock.unlock();
    Ended ended{.handle = std::move(item.handle), .due = {}};
    std::exception_ptr& error = ended.due.error;
    try {
      const OperationHere here;
      item.work(in_users_thread);
    } catch (const Error&) {
      error = std::current_exception();
    } catch (...) {
      error = std::current_exception();
      ended.interrupted = true;
    }
    item.work = nullptr;  // releases its objects before the completion
    lock.lock();
    owner = {};
    busy = false;
    // Before the token can be taken: an operation is done before a later one has run.
    ended.due.completion = ended.handle->finish(error);
    if (stopping) {
      idle.notify_all();
      for_worker.notify_one();
    }
    return ended;
  }

  // With the lock held, as the next two.
  void queueCompletion(Due next) {
    due.push_back(std::move(next));
    ensureCallbackThread();
    for_callbacks.notify_one();
  }

  // A completion may wait for a Future whose completion stands behind it in the queue, so one
  // thread more than those in a completion is always there.
  void ensureCallbackThread() {
    if (calling < alive) return;
    try {
      std::thread thread([state = shared_from_this()] { state->runCallbacks(); });
      ++alive;
      short_of_threads = false;
      if (abandoned)
        thread.detach();
      else
        callback_threads.push_back(std::move(thread));
    } catch (const std::system_error& error) {
      if (alive == 0) throw;
      if (!std::exchange(short_of_threads, true)) log(noThread("for completions", error));
      for_worker.notify_one();
    }
  }

  void runCallbacks() {
    name("ringreduce-done");
    std::unique_lock lock(mutex);
    for (;;) {
      for_callbacks.wait(lock, [&] { return !due.empty() || worker_done; });
      if (due.empty()) break;
      const uint64_t seen = taken;
      if (calling > 0 && for_callbacks.wait_for(lock, kPatience, [&] {
            return calling == 0 || taken != seen || due.empty();
          }))
        continue;
      callNext(lock);
    }
    --alive;
  }

  void callNext(std::unique_lock<std::mutex>& lock) {
    Due next = std::move(due.front());
    due.pop_front();
    ++taken;
    ++calling;
    if (!due.empty()) ensureCallbackThread();
    lock.unlock();
    call(next.completion, std::move(next.error));
    next = {};
    lock.lock();
    --calling;
  }
};

Executor::Executor() : state_(std::make_shared<State>()) {}

Executor::~Executor() {
  stop();
}

bool Executor::takeToken() {
  const std::lock_guard lock(state_->mutex);
  if (state_->stopping) throw Error(Failure::kAborted, "the group has been destroyed");
  if (state_->busy || !state_->queue.empty()) return false;
  state_->owner = std::this_thread::get_id();
  return state_->busy = true;
}

void Executor::returnToken() {
  const std::lock_guard lock(state_->mutex);
  state_->owner = {};
  state_->busy = false;
  // Notify only if a thread waits: every small operation passes here.
  if (state_->asleep && !state_->queue.empty()) state_->for_worker.notify_one();
  if (state_->stopping) state_->idle.notify_all();
}

bool Executor::runsInThisThread() const {
  const std::lock_guard lock(state_->mutex);
  return state_->owner == std::this_thread::get_id();
}

// Called with the lock held.  Without a callback thread a Future would never be completed; one
// without a worker only waits, until there is one.
void Executor::startThreads() {
  const std::shared_ptr<State> state = state_;
  try {
    state->ensureCallbackThread();
    state->worker = std::thread([state] { state->work(); });
  } catch (const std::system_error& error) {
    throw Error(Failure::kArgument, noThread("for asynchronous operations", error));
  }
}

std::shared_ptr<OperationHandle> Executor::submit(Work work, Completion completion, bool quick) {
  auto handle = std::make_shared<OperationHandle>();
  if (completion) handle->setCompletion(std::move(completion));
  const std::shared_ptr<State> state = state_;
  const std::lock_guard lock(state->mutex);
  if (state->stopping) throw Error(Failure::kAborted, "the group has been destroyed");
  if (!state->worker.joinable()) startThreads();
  state->queue.push_back({std::move(work), handle, quick ? now() + kQuickTime : 0});
  if (quick)
    ++state->quick;
  else
    state->hurried = true;
  if (state->asleep || !quick) state->for_worker.notify_one();
  return handle;
}

void Executor::finishAsidesOf(std::exception_ptr error) {
  try {
    finishAsides();
  } catch (...) {
    log("an operation failed, and so did a signal handler that had waited for it: the operation's "
        "error is raised");
  }
  std::rethrow_exception(error);
}

void Executor::runUntil(const OperationHandle& handle) {
  const std::shared_ptr<State> state = state_;
  std::exception_ptr interrupt;  // in an earlier operation
  std::exception_ptr handlers;   // of a signal handler, after an operation
  std::unique_lock lock(state->mutex);
  while (!handle.isDone()) {
    if (state->busy || state->queue.empty()) {
      state->hurried = !state->queue.empty();
      break;
    }
    State::Ended ended = state->runFirst(lock, /*in_users_thread=*/true);
    const bool is_own = ended.handle.get() == &handle;
    if (ended.interrupted && !is_own) interrupt = ended.due.error;
    // A thread that waits may call its own completion, which may wait for what is queued.
    if (ended.due.completion && is_own && !haveAsides()) {
      if (state->asleep && !state->queue.empty()) state->for_worker.notify_one();
      const auto caller = state->own_callers.insert(std::this_thread::get_id());
      lock.unlock();
      State::call(ended.due.completion, ended.due.error);
      ended = {};
      lock.lock();
      state->own_callers.erase(caller);
    } else if (ended.due.completion) {
      state->queueCompletion(std::move(ended.due));
    }
    // Handlers may wait for the completion, which has been called or is another thread's.
    lock.unlock();
    try {
      finishAsides();
    } catch (...) {
      if (!handlers) handlers = std::current_exception();
    }
    lock.lock();
  }
  if (state->asleep && !state->queue.empty()) state->for_worker.notify_one();
  lock.unlock();
  if (interrupt && handle.error()) std::rethrow_exception(interrupt);
  if (handlers && !(handle.isDone() && handle.error())) std::rethrow_exception(handlers);
}

void Executor::hurry() {
  const std::lock_guard lock(state_->mutex);
  if (state_->queue.empty() || std::exchange(state_->hurried, true)) return;
  state_->for_worker.notify_one();
}

void Executor::callLater(Completion completion, std::exception_ptr error) {
  const std::shared_ptr<State> state = state_;
  {
    const std::lock_guard lock(state->mutex);
    if (!state->stopping) {
      if (!state->worker.joinable()) startThreads();
      state->queueCompletion({std::move(completion), std::move(error)});
      return;
    }
  }
  // The group is being left: its callback threads may have ended.
  State::call(completion, std::move(error));
}

bool Executor::isIdle() const {
  const std::lock_guard lock(state_->mutex);
  return !state_->busy && state_->queue.empty();
}

void Executor::drain(void (*poll)()) {
  const std::shared_ptr<State> state = state_;
  std::unique_lock lock(state->mutex);
  // A completion that calls this must not wait for itself, nor for others that may wait for it.
  const auto self = std::this_thread::get_id();
  const auto& callback_threads = state->callback_threads;
  if (std::ranges::any_of(callback_threads, [&](auto& t) { return t.get_id() == self; })) return;
  if (state->own_callers.contains(self)) return;
  while (state->busy || state->calling > 0 || !state->own_callers.empty() ||
         !state->queue.empty() || !state->due.empty()) {
    state->idle.wait_for(lock, std::chrono::milliseconds(1));
    if (!poll) continue;
    lock.unlock();
    poll();
    lock.lock();
  }
}

void Executor::stop(void (*poll)()) {
  std::unique_lock lock(state_->mutex);
  state_->stopping = true;
  state_->for_worker.notify_one();
  // In a completion that the worker calls, only this thread can run what is queued.
  const bool in_worker = state_->worker.get_id() == std::this_thread::get_id();
  // An operation that runs in another user's thread ends first.
  while (state_->busy || !state_->queue.empty()) {
    if (in_worker && !state_->busy) {
      State::Due next = state_->runFirst(lock, /*in_users_thread=*/false).due;
      if (next.completion) state_->queueCompletion(std::move(next));
      continue;
    }
    state_->idle.wait_for(lock, std::chrono::milliseconds(50));
    if (!poll) continue;
    lock.unlock();
    poll();
    lock.lock();
  }
  if (std::thread worker = std::move(state_->worker); in_worker) {
    worker.detach();
  } else if (worker.joinable()) {
    lock.unlock();
    worker.join();
    lock.lock();
  }
  state_->worker_done = true;  // also if there never was one
  state_->for_callbacks.notify_all();
  const auto self = std::this_thread::get_id();
  auto& callback_threads = state_->callback_threads;
  if (in_worker ||
      std::ranges::any_of(callback_threads, [&](auto& t) { return t.get_id() == self; })) {
    // A completion must not wait for others, which may wait for it.
    state_->abandoned = true;
    for (std::thread& thread : callback_threads) thread.detach();
    callback_threads.clear();
  }
  while (!callback_threads.empty()) {  // a thread that ends may have started another
    std::thread thread = std::move(callback_threads.back());
    callback_threads.pop_back();
    lock.unlock();
    thread.join();
    lock.lock();
  }
}

}  // namespace ringreduce
