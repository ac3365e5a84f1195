// A store whose calls end in time: answers and errors, a stopped process, a call that hangs, and
// the end of the threads.
#include "survival/timed_store.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "base/limits.h"
#include "check.h"
#include "processes.h"
#include "ranks.h"

using namespace ringreduce;
using ranks::failureOf;

namespace {

// A store whose calls begin with `before`.
class SlowStore final : public Store {
 public:
  explicit SlowStore(std::function<void()> before) : before_(std::move(before)) {}
  void set(const std::string& key, const std::string& value) override {
    before_();
    store_.set(key, value);
  }
  std::optional<std::string> get(const std::string& key) override {
    before_();
    return store_.get(key);
  }
  void remove(const std::string& key) override {
    before_();
    store_.remove(key);
  }
  std::string setOnce(const std::string& key, const std::string& value) override {
    before_();
    if (const auto known = store_.get(key)) return *known;
    store_.set(key, value);
    return value;
  }

 private:
  const std::function<void()> before_;
  ranks::MemoryStore store_;
};

std::unique_ptr<TimedStore> timed(std::function<void()> before,
                                  Nanos longest = limits::kStoreAnswer) {
  return std::make_unique<TimedStore>(std::make_shared<SlowStore>(std::move(before)), "rank 1",
                                      longest);
}

int threads() {
  int found = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::getline(std::ifstream(task.path() / "comm") >> std::ws, name);
    found += name == "ringreduce-kv";
  }
  return found;
}

TEST(a_stopped_process_does_not_take_its_stop_for_the_stores) {
  const pid_t child = fork();
  if (child == 0) {
    const auto store = timed(
        [] {
          for (const Nanos until = deadlineIn(kSecond); now() < until;)
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
        },
        3 * kSecond);
    try {
      _exit(store->get("a") ? 1 : 0);
    } catch (const std::exception& error) {
      log(error.what());
      _exit(2);
    }
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  CHECK_EQ(kill(child, SIGSTOP), 0);
  std::this_thread::sleep_for(std::chrono::seconds(4));
  CHECK_EQ(kill(child, SIGCONT), 0);
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
}

TEST(a_thread_makes_each_call_alone_and_ends_with_it) {
  std::atomic<std::thread::id> caller;
  std::atomic<int> calls = 0;
  std::atomic<bool> is_alone = true;
  auto store = timed([&] {
    if (++calls != 1) is_alone = false;
    caller = std::this_thread::get_id();
    --calls;
  });
  store->set("a", "1");
  CHECK_EQ(*store->get("a"), "1");
  CHECK_EQ(store->setOnce("a", "2"), "1");
  store->remove("a");
  CHECK(!store->get("a"));
  ranks::inThreads(4, [&](int r) {
    const std::string key(1, static_cast<char>('b' + r));
    for (int i = 0; i < 100; ++i) {
      store->set(key, std::to_string(i));
      CHECK_EQ(*store->get(key), std::to_string(i));
    }
  });
  CHECK(is_alone && caller.load() != std::this_thread::get_id());
  ranks::await("the thread has ended", [] { return threads() == 0; });
}

TEST(an_error_in_the_thread_is_that_of_the_call) {
  std::function<void()> fails;
  const auto store = timed([&] {
    if (fails) fails();
  });
  fails = [] { throw Error(Failure::kSetup, "no server"); };
  CHECK_THROWS(StoreFailure, store->get("a"));
  CHECK(failureOf([&] { store->set("a", "1"); },
                  "rank 1 cannot go on after a loss between hosts: it needs a store that outlives "
                  "every rank, as `python -m ringreduce.supervise` holds one: no server") ==
        Failure::kPeerLost);
  fails = [] { throw std::runtime_error("another"); };
  CHECK_THROWS(std::runtime_error, store->remove("a"));
  fails = nullptr;
  CHECK_EQ(store->setOnce("a", "2"), "2");
}

TEST(a_call_that_hangs_fails_in_time_and_later_ones_fail_at_once) {
  std::atomic<bool> may_end = false;
  auto slow = std::make_shared<SlowStore>([&] {
    while (!may_end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  const std::weak_ptr<Store> held = slow;
  auto store = std::make_unique<TimedStore>(std::move(slow), "rank 1", 2 * kSecond);
  const auto fails = [&] {
    CHECK(failureOf([&] { store->set("a", "1"); },
                    "rank 1 cannot go on after a loss: the store has not answered for 2 s; was "
                    "this host cut off from it?") == Failure::kPeerLost);
  };
  const Nanos begin = monotonicNow();
  fails();
  const Nanos first = monotonicNow();
  CHECK(first - begin >= 2 * kSecond && first - begin < 5 * kSecond);
  for (int i = 0; i < 3; ++i) fails();
  CHECK(monotonicNow() - first < kSecond);
  store.reset();
  CHECK_EQ(threads(), 1);
  CHECK(!held.expired());  // the call is still in it
  may_end = true;
  ranks::await("store and thread are gone", [&] { return held.expired() && threads() == 0; });
}

}  // namespace
