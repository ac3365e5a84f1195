// Ranks as threads of one process: a store in memory, and a function run once by each rank.  Also
// what tests of groups have in common: settings for a scope, and which error a call gives.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "group/group.h"

namespace ranks {

// Sets an environment variable for a scope.
struct Setting {
  Setting(const char* name, const std::string& value) : name(name) {
    setenv(name, value.c_str(), 1);
  }
  ~Setting() { unsetenv(name); }
  const char* name;
};

// Whether the whole test is run over sockets.
inline bool overSockets() {
  const char* wire = std::getenv("RINGREDUCE_WIRE");
  return wire && std::string(wire) == "tcp";
}

// How a call fails, and that its error says `words`.
inline ringreduce::Failure failureOf(const std::function<void()>& call,
                                     const std::string& words = "") {
  try {
    call();
  } catch (const ringreduce::Error& error) {
    if (std::string(error.what()).find(words) == std::string::npos)
      throw std::runtime_error("'" + words + "' is not in: " + error.what());
    return error.kind();
  }
  return ringreduce::Failure::kNone;
}

inline void sleepMs(int ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

inline void waitForFailure(const ringreduce::Group& group) {
  while (!group.failed()) sleepMs(1);
}

class MemoryStore final : public ringreduce::Store {
 public:
  void set(const std::string& key, const std::string& value) override {
    const std::lock_guard lock(mutex_);
    values_[key] = value;
  }
  std::optional<std::string> get(const std::string& key) override {
    const std::lock_guard lock(mutex_);
    const auto found = values_.find(key);
    if (found == values_.end()) return std::nullopt;
    return found->second;
  }
  void remove(const std::string& key) override {
    const std::lock_guard lock(mutex_);
    values_.erase(key);
  }
  size_t size() {
    const std::lock_guard lock(mutex_);
    return values_.size();
  }
  // Keys that something is left in.
  size_t full() {
    const std::lock_guard lock(mutex_);
    return static_cast<size_t>(
        std::ranges::count_if(values_, [](const auto& one) { return !one.second.empty(); }));
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::string> values_;
};

// Runs body(r) in a thread for each rank, waits for all, and throws the error that came first:
// those of other ranks may be its consequences.
inline void inThreads(int size, const std::function<void(int)>& body) {
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r)
    threads.emplace_back([&, r] {
      try {
        body(r);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
      }
    });
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

// Waits for something, a minute at most; `what` names it in the error.
template <class F>
void await(const char* what, F&& is_so) {
  for (const ringreduce::Nanos deadline = ringreduce::deadlineIn(60 * ringreduce::kSecond);
       !is_so(); std::this_thread::sleep_for(std::chrono::microseconds(100)))
    if (ringreduce::now() > deadline)
      throw std::runtime_error(std::string("it never was so: ") + what);
}

// Threads of a test wait here for each other: a minute at most, since one of them may have failed.
class MeetingPoint {
 public:
  explicit MeetingPoint(int size) : missing_(size) {}
  void wait() {
    const ringreduce::Nanos deadline = ringreduce::deadlineIn(60 * ringreduce::kSecond);
    for (--missing_; missing_ > 0 && ringreduce::now() < deadline;)
      std::this_thread::sleep_for(std::chrono::microseconds(100));
  }

 private:
  std::atomic<int> missing_;
};

// The same with a new group for all of them.  The timeout is for operations: making the group may
// take longer on a busy machine.
inline void inGroup(int size, const std::function<void(ringreduce::Group&)>& body,
                    ringreduce::GroupOptions options = {}) {
  MemoryStore store;
  if (options.name.empty()) options.name = "test";
  const ringreduce::Nanos timeout = options.timeout;
  options.timeout = std::max(timeout, 60 * ringreduce::kSecond);
  MeetingPoint made(size);
  inThreads(size, [&](int r) {
    const auto group = ringreduce::Group::create(store, r, size, options);
    group->setTimeout(timeout);
    made.wait();  // a rank that fails now would fail others that are still in create()
    body(*group);
  });
}

}  // namespace ranks
