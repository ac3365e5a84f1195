// The queue, the worker and the tellers.
#include "base/executor.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"

namespace ringreduce {
namespace {

// How long a completion may keep the next one waiting before another thread calls that.
constexpr auto kPatience = std::chrono::milliseconds(1);

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

bool OperationHandle::wait(int64_t longest, void (*turn)()) {
  refuseInChild();
  const Nanos deadline = deadlineIn(longest);
  std::unique_lock lock(mutex_);
  while (!done_) {
    const Nanos left = deadline - now();
    if (left <= 0) return false;
    changed_.wait_for(lock, std::chrono::nanoseconds(std::min(left, 50 * kMillisecond)));
    if (!done_ && turn) {
      lock.unlock();
      turn();
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
    std::shared_ptr<OperationHandle> ticket;
  };
  struct Told {
    Completion completion;
    std::exception_ptr error;
  };

  std::mutex mutex;
  std::condition_variable for_worker, for_teller, idle;
  std::deque<Item> queue;
  std::deque<Told> to_tell;
  uint64_t told = 0;         // completions that were taken from to_tell
  int alive = 0;             // tellers
  int calling = 0;           // of them, those that are calling a completion
  bool abandoned = false;    // nobody will join the tellers
  bool busy = false;         // the token: an operation runs
  std::thread::id owner;     // who holds it, if that is a user's thread
  bool worker_done = false;  // no more completions will come
  bool stopping = false;
  std::thread worker;
  std::vector<std::thread> tellers;

  // What a completion throws is nobody's to catch.
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
    for (;;) {
      for_worker.wait(lock,
                      [&] { return (!queue.empty() && !busy) || (stopping && queue.empty()); });
      if (queue.empty()) break;
      Item item = std::move(queue.front());
      queue.pop_front();
      busy = true;
      lock.unlock();
      std::exception_ptr error;
      try {
        item.work(/*in_users_thread=*/false);
      } catch (...) {
        error = std::current_exception();
      }
      item.work = nullptr;  // whatever it holds is given back before anybody is told
      lock.lock();
      busy = false;
      // Before anybody can take the token: an operation that is over when a later one has run.
      if (Completion completion = item.ticket->finish(error))
        queueTold({std::move(completion), std::move(error)});
      if (stopping) idle.notify_all();
    }
    worker_done = true;
    for_teller.notify_all();
  }

  // With the lock held, as the next two.
  void queueTold(Told told_next) {
    to_tell.push_back(std::move(told_next));
    ensureTeller();
    for_teller.notify_one();
  }

  // A completion may itself wait for a Future whose completion stands behind it in the queue, so
  // there is always a teller that is not calling one.  It is patient, and most never call any.
  void ensureTeller() {
    if (calling < alive) return;
    try {
      std::thread teller([state = shared_from_this()] { state->tell(); });
      ++alive;
      if (abandoned)
        teller.detach();
      else
        tellers.push_back(std::move(teller));
    } catch (const std::system_error& error) {
      if (alive == 0) throw;
      log(std::string("cannot start a thread for completions, which come later for it: ") +
          error.what());
    }
  }

  void tell() {
    name("ringreduce-done");
    std::unique_lock lock(mutex);
    for (;;) {
      for_teller.wait(lock, [&] { return !to_tell.empty() || worker_done; });
      if (to_tell.empty()) break;
      const uint64_t seen = told;
      if (calling > 0 && for_teller.wait_for(lock, kPatience, [&] {
            return calling == 0 || told != seen || to_tell.empty();
          }))
        continue;
      Told next = std::move(to_tell.front());
      to_tell.pop_front();
      ++told;
      ++calling;
      if (!to_tell.empty()) ensureTeller();
      lock.unlock();
      call(next.completion, std::move(next.error));
      next = {};
      lock.lock();
      --calling;
    }
    --alive;
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
  // Only where somebody has reason to wake: this is on the way of every small operation.
  if (!state_->queue.empty()) state_->for_worker.notify_one();
  if (state_->stopping) state_->idle.notify_all();
}

bool Executor::runsInThisThread() const {
  const std::lock_guard lock(state_->mutex);
  return state_->owner == std::this_thread::get_id();
}

// Called with the lock held.  Without a teller a Future would never be completed; one without a
// worker only waits, until there is one.
void Executor::startThreads() {
  const std::shared_ptr<State> state = state_;
  try {
    state->ensureTeller();
    state->worker = std::thread([state] { state->work(); });
  } catch (const std::system_error& error) {
    throw Error(Failure::kArgument,
                std::string("ringreduce cannot start a thread for asynchronous operations: ") +
                    error.what());
  }
}

std::shared_ptr<OperationHandle> Executor::submit(Work work, Completion completion) {
  auto ticket = std::make_shared<OperationHandle>();
  if (completion) ticket->setCompletion(std::move(completion));
  const std::shared_ptr<State> state = state_;
  const std::lock_guard lock(state->mutex);
  if (state->stopping) throw Error(Failure::kAborted, "the group has been destroyed");
  if (!state->worker.joinable()) startThreads();
  state->queue.push_back({std::move(work), ticket});
  state->for_worker.notify_one();
  return ticket;
}

void Executor::tell(Completion completion, std::exception_ptr error) {
  const std::shared_ptr<State> state = state_;
  {
    const std::lock_guard lock(state->mutex);
    if (!state->stopping) {
      if (!state->worker.joinable()) startThreads();
      state->queueTold({std::move(completion), std::move(error)});
      return;
    }
  }
  State::call(completion, std::move(error));  // the group is being left: its tellers may be gone
}

void Executor::drain(void (*turn)()) {
  const std::shared_ptr<State> state = state_;
  std::unique_lock lock(state->mutex);
  // A completion that calls this cannot wait for itself, nor for others that may wait for it.
  const auto self = std::this_thread::get_id();
  const auto& tellers = state->tellers;
  if (std::any_of(tellers.begin(), tellers.end(), [&](auto& t) { return t.get_id() == self; }))
    return;
  while (state->busy || state->calling > 0 || !state->queue.empty() || !state->to_tell.empty()) {
    state->idle.wait_for(lock, std::chrono::milliseconds(1));
    if (!turn) continue;
    lock.unlock();
    turn();
    lock.lock();
  }
}

void Executor::stop(void (*turn)()) {
  std::unique_lock lock(state_->mutex);
  state_->stopping = true;
  state_->for_worker.notify_one();
  // An operation that runs in another user's thread ends first.
  while (state_->busy || !state_->queue.empty()) {
    state_->idle.wait_for(lock, std::chrono::milliseconds(50));
    if (!turn) continue;
    lock.unlock();
    turn();
    lock.lock();
  }
  if (std::thread worker = std::move(state_->worker); worker.joinable()) {
    lock.unlock();
    worker.join();
    lock.lock();
  }
  state_->worker_done = true;  // also if there never was one
  state_->for_teller.notify_all();
  const auto self = std::this_thread::get_id();
  auto& tellers = state_->tellers;
  if (std::any_of(tellers.begin(), tellers.end(), [&](auto& t) { return t.get_id() == self; })) {
    // A completion cannot wait for others, which may wait for it.
    state_->abandoned = true;
    for (std::thread& teller : tellers) teller.detach();
    tellers.clear();
  }
  while (!tellers.empty()) {  // one that ends may have started another
    std::thread teller = std::move(tellers.back());
    tellers.pop_back();
    lock.unlock();
    teller.join();
    lock.lock();
  }
}

}  // namespace ringreduce
