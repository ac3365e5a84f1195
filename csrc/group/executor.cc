// The queue, the worker and the teller.
#include "group/executor.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <system_error>
#include <utility>

#include "base/clock.h"
#include "base/error.h"

namespace ringreduce {

// ---- Ticket

bool Ticket::isDone() const {
  const std::lock_guard lock(mutex_);
  return done_;
}

void Ticket::refuseInChild() const {
  if (forkGeneration() != generation_)
    throw Error(Failure::kArgument, "this operation is the parent process's to wait for");
}

bool Ticket::wait(int64_t longest, void (*turn)()) {
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

std::exception_ptr Ticket::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

bool Ticket::setCompletion(Completion completion) {
  const std::lock_guard lock(mutex_);
  if (!done_) completion_ = std::move(completion);
  return !done_;
}

Ticket::Completion Ticket::finish(std::exception_ptr error) {
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

struct Executor::State {
  struct Item {
    Work work;
    std::shared_ptr<Ticket> ticket;
  };
  struct Told {
    Completion completion;
    std::exception_ptr error;
  };

  std::mutex mutex;
  std::condition_variable for_worker, for_teller, idle;
  std::deque<Item> queue;
  std::deque<Told> to_tell;
  bool telling = false;      // a completion is being called
  bool busy = false;         // the token: an operation runs
  std::thread::id owner;     // who holds it, if that is a user's thread
  bool worker_done = false;  // no more completions will come
  bool stopping = false;
  std::thread worker, teller;

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
      if (Completion completion = item.ticket->finish(error)) {
        to_tell.push_back({std::move(completion), std::move(error)});
        for_teller.notify_one();
      }
      if (stopping) idle.notify_all();
    }
    worker_done = true;
    for_teller.notify_one();
  }

  // Once startThreads is over: whether it has started both threads.
  bool waitForWorker() {
    const std::lock_guard lock(mutex);
    return worker.joinable() || worker_done || stopping;
  }

  void tell() {
    name("ringreduce-done");
    std::unique_lock lock(mutex);
    for (;;) {
      for_teller.wait(lock, [&] { return !to_tell.empty() || worker_done; });
      if (to_tell.empty()) return;
      Told next = std::move(to_tell.front());
      to_tell.pop_front();
      telling = true;
      lock.unlock();
      next.completion(std::move(next.error));
      next = {};
      lock.lock();
      telling = false;
    }
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

// Both or none: without the teller a Future would never be completed.  Called with the lock held,
// which keeps the first from running before the second is there.
void Executor::startThreads() {
  const std::shared_ptr<State> state = state_;
  try {
    std::thread teller([state] {
      if (state->waitForWorker()) state->tell();
    });
    try {
      state->worker = std::thread([state] { state->work(); });
    } catch (...) {
      teller.detach();  // it sees that there is no worker, and ends
      throw;
    }
    state->teller = std::move(teller);
  } catch (const std::system_error& error) {
    throw Error(Failure::kArgument,
                std::string("ringreduce cannot start a thread for asynchronous operations: ") +
                    error.what());
  }
}

std::shared_ptr<Ticket> Executor::submit(Work work, Completion completion) {
  auto ticket = std::make_shared<Ticket>();
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
      state->to_tell.push_back({std::move(completion), std::move(error)});
      state->for_teller.notify_one();
      return;
    }
  }
  completion(std::move(error));  // the group is being left: its thread for this may be gone
}

void Executor::drain(void (*turn)()) {
  const std::shared_ptr<State> state = state_;
  std::unique_lock lock(state->mutex);
  while (state->busy || state->telling || !state->queue.empty() || !state->to_tell.empty()) {
    state->idle.wait_for(lock, std::chrono::milliseconds(1));
    if (!turn) continue;
    lock.unlock();
    turn();
    lock.lock();
  }
}

void Executor::stop(void (*turn)()) {
  std::thread worker, teller;
  {
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
    worker.swap(state_->worker);
    teller.swap(state_->teller);
  }
  for (std::thread* thread : {&worker, &teller}) {
    if (!thread->joinable()) continue;
    if (thread->get_id() == std::this_thread::get_id())
      thread->detach();
    else
      thread->join();
  }
}

}  // namespace ringreduce
