// A call in a thread, and how it is waited for.
#include "survival/timed_store.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <utility>

#include "base/text.h"
#include "base/thread.h"

namespace ringreduce {

TimedStore::TimedStore(std::shared_ptr<Store> store, std::string who, Nanos longest)
    : who_(std::move(who)), longest_(longest), store_(std::move(store)) {}

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

TimedStore::Answer TimedStore::ask(const Call& call) {
  const std::lock_guard one_call(calls_mutex_);
  if (!hangs_) {
    const Nanos until = deadlineIn(longest_);
    std::future<Answer> answer;
    std::thread thread;
    while (!thread.joinable()) {
      std::packaged_task<Answer()> task([call, store = store_] { return call(*store); });
      answer = task.get_future();
      try {
        thread = startThread("ringreduce-kv", "that asks the store", std::move(task));
      } catch (const Error& error) {
        // Other processes may have used up the system's threads for a moment.
        if (now() > until) throw failure(std::string(": ") + error.what());
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    }
    // The clock would take a longer wait for a stop of the process.
    constexpr Nanos kLook = ProcessClock::kLongestGap / 2;
    for (Nanos left = longest_; left > 0; left = until - now()) {
      const auto look = std::chrono::nanoseconds(std::min(left, kLook));
      if (answer.wait_for(look) != std::future_status::ready) continue;
      thread.join();
      try {
        return answer.get();
      } catch (const Error& known) {
        throw failure(
            " between hosts: it needs a store that outlives every rank, as `python -m "
            "ringreduce.supervise` holds one: " +
            std::string(known.what()));
      }
    }
    hangs_ = true;
    thread.detach();
  }
  throw failure(": the store has not answered for " + seconds(longest_) +
                "; was this host cut off from it?");
}

StoreFailure TimedStore::failure(const std::string& why) const {
  return {Failure::kPeerLost, who_ + " cannot go on after a loss" + why};
}

}  // namespace ringreduce
