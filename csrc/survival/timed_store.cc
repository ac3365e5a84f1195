// The thread, and how a call waits for it.
#include "survival/timed_store.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <thread>
#include <utility>

#include "base/text.h"
#include "base/thread.h"

namespace ringreduce {

struct TimedStore::State {
  explicit State(std::shared_ptr<Store> made) : store(std::move(made)) {}

  const std::shared_ptr<Store> store;
  std::thread thread;
  std::mutex mutex;  // of the rest
  std::condition_variable changed;
  Call call = nullptr;  // not begun
  bool is_done = false;
  Answer answer;
  std::exception_ptr error;
  bool is_over = false;  // no more calls: this object ends, or one hangs

  void run() {
    std::unique_lock lock(mutex);
    for (;;) {
      changed.wait(lock, [this] { return call || is_over; });
      if (is_over) return;
      const Call taken = std::exchange(call, nullptr);
      lock.unlock();
      Answer given;
      std::exception_ptr thrown;
      try {
        given = taken(*store);
      } catch (...) {
        thrown = std::current_exception();
      }
      lock.lock();
      answer = std::move(given);
      error = std::move(thrown);
      is_done = true;
      changed.notify_all();
    }
  }
};

TimedStore::TimedStore(std::shared_ptr<Store> store, std::string who, Nanos longest)
    : who_(std::move(who)), longest_(longest), state_(std::make_shared<State>(std::move(store))) {}

TimedStore::~TimedStore() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->is_over = true;
  }
  state_->changed.notify_all();
  if (state_->thread.joinable()) state_->thread.join();
}

void TimedStore::set(const std::string& key, const std::string& value) {
  ask([=](Store& store) -> Answer {
    store.set(key, value);
    return std::nullopt;
  });
}

std::optional<std::string> TimedStore::get(const std::string& key) {
  return ask([=](Store& store) { return store.get(key); });
}

void TimedStore::remove(const std::string& key) {
  ask([=](Store& store) -> Answer {
    store.remove(key);
    return std::nullopt;
  });
}

std::string TimedStore::setOnce(const std::string& key, const std::string& value) {
  return *ask([=](Store& store) { return store.setOnce(key, value); });
}

TimedStore::Answer TimedStore::ask(Call call) {
  const std::lock_guard one_call(calls_mutex_);
  State& s = *state_;
  std::unique_lock lock(s.mutex);
  const Nanos until = deadlineIn(longest_);
  if (!s.is_over) {
    if (!s.thread.joinable()) try {
        s.thread =
            startThread("ringreduce-kv", "that asks the store", [state = state_] { state->run(); });
      } catch (const Error& error) {
        throw failure(std::string(": ") + error.what());
      }
    s.call = std::move(call);
    s.is_done = false;
    s.changed.notify_all();
  }
  while (!s.is_over && !s.is_done) {
    if (const Nanos left = until - now(); left > 0) {
      // The clock would take a longer wait for a stop of the process.
      constexpr Nanos kLook = ProcessClock::kLongestGap / 2;
      s.changed.wait_for(lock, std::chrono::nanoseconds(std::min(left, kLook)));
    } else {
      s.is_over = true;
      s.thread.detach();
    }
  }
  if (s.is_over)
    throw failure(": the store has not answered for " + seconds(longest_) +
                  "; was this host cut off from it?");
  if (const auto error = std::exchange(s.error, nullptr)) try {
      std::rethrow_exception(error);
    } catch (const Error& known) {
      throw failure(
          " between hosts: it needs a store that outlives every rank, as `python -m "
          "ringreduce.supervise` holds one: " +
          std::string(known.what()));
    }
  return std::move(s.answer);
}

StoreFailure TimedStore::failure(const std::string& why) const {
  return {Failure::kPeerLost, who_ + " cannot go on after a loss" + why};
}

}  // namespace ringreduce
