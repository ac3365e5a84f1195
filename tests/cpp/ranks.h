// Ranks as threads of one process: a store in memory, and a function run once by each rank.
#pragma once

#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "group/group.h"

namespace ranks {

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

 private:
  std::mutex mutex_;
  std::map<std::string, std::string> values_;
};

// Runs body(r) in a thread for each rank, waits for all, and throws the first error of the lowest
// rank.
inline void inThreads(int size, const std::function<void(int)>& body) {
  std::vector<std::exception_ptr> errors(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r)
    threads.emplace_back([&, r] {
      try {
        body(r);
      } catch (...) {
        errors[static_cast<size_t>(r)] = std::current_exception();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const auto& error : errors)
    if (error) std::rethrow_exception(error);
}

// The same with a new group for all of them.
inline void inGroup(int size, const std::function<void(ringreduce::Group&)>& body,
                    ringreduce::GroupOptions options = {}) {
  MemoryStore store;
  if (options.name.empty()) options.name = "test";
  inThreads(size, [&](int r) {
    const auto group = ringreduce::Group::create(store, r, size, options);
    body(*group);
  });
}

}  // namespace ranks
