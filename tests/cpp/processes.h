// Ranks as forked processes, and a store that they share.
//
// Forked before anything else happens in them: a process that has used a GPU, or has threads, must
// not be forked.  Each rank is a child of the test; what it throws is told to the parent, which
// throws it too.
#pragma once

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "group/group.h"

namespace processes {

inline constexpr ringreduce::Nanos kHang = 120 * ringreduce::kSecond;  // a child that takes longer

// A few keys in memory that all children share.
class SharedStore final : public ringreduce::Store {
 public:
  SharedStore() {
    void* memory =
        mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("no memory for a store");
    table_ = static_cast<Table*>(memory);
  }
  ~SharedStore() override { munmap(table_, sizeof(Table)); }

  void set(const std::string& key, const std::string& value) override {
    const Lock lock(*table_);
    setLocked(key, value);
  }
  std::string setOnce(const std::string& key, const std::string& value) override {
    const Lock lock(*table_);
    if (!find(key)) setLocked(key, value);
    return find(key)->value;
  }
  std::optional<std::string> get(const std::string& key) override {
    const Lock lock(*table_);
    const Entry* entry = find(key);
    if (!entry) return std::nullopt;
    return entry->value;
  }
  void remove(const std::string& key) override {
    const Lock lock(*table_);
    if (Entry* entry = find(key)) entry->key[0] = 0;
  }

 private:
  struct Entry {
    char key[256], value[4096];
  };
  struct Table {
    std::atomic<bool> taken;
    Entry entries[128];
  };
  struct Lock {
    explicit Lock(Table& t) : table(t) {
      while (table.taken.exchange(true)) std::this_thread::yield();
    }
    ~Lock() { table.taken = false; }
    Table& table;
  };
  void setLocked(const std::string& key, const std::string& value) {
    Entry* entry = find(key);
    if (!entry) entry = find("");
    if (!entry || key.size() >= sizeof entry->key || value.size() >= sizeof entry->value)
      throw std::runtime_error("the tests' store is full");
    std::strcpy(entry->key, key.c_str());
    std::strcpy(entry->value, value.c_str());
  }
  Entry* find(const std::string& key) {
    for (Entry& entry : table_->entries)
      if (key == entry.key) return &entry;
    return nullptr;
  }

  Table* table_;
};

// How a child ended: "" if its body returned, else what it threw, or the signal.
using Ends = std::vector<std::string>;

// Runs body(r) in a process for each rank.
inline Ends run(int size, const std::function<void(int)>& body) {
  struct Child {
    pid_t pid;
    int pipe;
  };
  std::vector<Child> children;
  std::fflush(nullptr);
  for (int r = 0; r < size; ++r) {
    int ends[2];
    if (pipe(ends) != 0) throw std::runtime_error("no pipe");
    const pid_t pid = fork();
    if (pid < 0) throw std::runtime_error("cannot fork");
    if (pid == 0) {
      std::string text;
      try {
        body(r);
      } catch (const std::exception& error) {
        text = error.what();
      }
      if (!text.empty() && write(ends[1], text.data(), text.size()) < 0) _exit(2);
      std::fflush(nullptr);
      _exit(text.empty() ? 0 : 1);
    }
    close(ends[1]);
    children.push_back({pid, ends[0]});
  }
  Ends result;
  const ringreduce::Nanos deadline = ringreduce::deadlineIn(kHang);
  for (const Child& child : children) {
    int status = 0;
    bool hung = false;
    while (waitpid(child.pid, &status, WNOHANG) == 0) {
      if (!hung && ringreduce::now() > deadline) {
        kill(child.pid, SIGKILL);
        hung = true;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    std::string text;
    char part[512];
    for (ssize_t n; (n = read(child.pipe, part, sizeof part)) > 0;)
      text.append(part, static_cast<size_t>(n));
    close(child.pipe);
    if (hung) text = "hung";
    if (text.empty() && WIFSIGNALED(status))
      text = "killed by signal " + std::to_string(WTERMSIG(status));
    if (text.empty() && WIFEXITED(status) && WEXITSTATUS(status) != 0)
      text = "exit status " + std::to_string(WEXITSTATUS(status));
    result.push_back(text);
  }
  return result;
}

// The same with a group of all of them; throws if one ended otherwise than well, but for those in
// `doomed`, who must be killed.
inline void inGroup(int size, const std::function<void(ringreduce::Group&)>& body,
                    ringreduce::GroupOptions options = {}, const std::vector<int>& doomed = {}) {
  SharedStore store;
  if (options.name.empty()) options.name = "test";
  const Ends ends = run(size, [&](int r) {
    const auto group = ringreduce::Group::create(store, r, size, options);
    body(*group);
  });
  for (int r = 0; r < size; ++r) {
    const std::string& end = ends[static_cast<size_t>(r)];
    bool shall_die = false;
    for (int d : doomed) shall_die = shall_die || d == r;
    if (shall_die ? !end.starts_with("killed by signal") : !end.empty())
      throw std::runtime_error("rank " + std::to_string(r) + ": " + (end.empty() ? "lives" : end));
  }
}

}  // namespace processes
