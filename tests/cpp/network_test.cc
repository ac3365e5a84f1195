// Groups whose ranks share no memory, and what becomes of them when one rank, or one connection, is
// gone: ranks of this machine, which go over sockets or pose as hosts.
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "epoch/wires.h"
#include "messages.h"
#include "p2p/engine.h"
#include "processes.h"
#include "ranks.h"
#include "transport/tcp/tls.h"

using namespace ringreduce;
using messages::Letter;
using messages::letter;
using ranks::failureOf;
using ranks::sleepMs;
using ranks::waitForFailure;

namespace {

void overSockets(int size, const std::function<void(Group&)>& body, Nanos timeout = 60 * kSecond,
                 const std::vector<int>& doomed = {}) {
  const ranks::Setting wire("RINGREDUCE_WIRE", "tcp");
  processes::inGroup(size, body, {.name = "test", .timeout = timeout}, doomed);
}

// Runs body(i, rank, store) in a process for each rank of `count` groups, which wait at the same
// time; rank r is on the host of letter r.
std::vector<processes::Ends> onHostsAtOnce(size_t count, const std::string& letters,
                                           const std::function<void(size_t, int, Store&)>& body) {
  std::vector<processes::SharedStore> stores(count);
  const int size = static_cast<int>(letters.size());
  const processes::Ends all = processes::run(static_cast<int>(count) * size, [&](int process) {
    const int r = process % size;
    const auto group = static_cast<size_t>(process / size);
    const ranks::Setting host("RINGREDUCE_HOSTID", letters.substr(static_cast<size_t>(r), 1));
    body(group, r, stores[group]);
  });
  std::vector<processes::Ends> by_group;
  for (auto begin = all.begin(); begin != all.end(); begin += size)
    by_group.emplace_back(begin, begin + size);
  return by_group;
}

processes::Ends onHosts(const std::string& letters, const std::function<void(int, Store&)>& body) {
  return onHostsAtOnce(1, letters, [&](size_t, int r, Store& store) { body(r, store); })[0];
}

void awaitStopped(pid_t pid) {
  ranks::await("it is stopped", [pid] {
    std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
    std::string number, name;
    char state = 0;
    return stat >> number >> name >> state && state == 'T';
  });
}

// This process's connections.
std::set<int> connections() {
  std::set<int> all;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename());
    int protocol = 0;
    socklen_t size = sizeof protocol;
    sockaddr_storage other{};
    socklen_t length = sizeof other;
    if (getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &size) == 0 && protocol == IPPROTO_TCP &&
        getpeername(fd, reinterpret_cast<sockaddr*>(&other), &length) == 0)
      all.insert(fd);
  }
  return all;
}

// Memory that all ranks see.
template <class T>
T& shared() {
  void* memory =
      mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("no memory to share");
  return *static_cast<T*>(memory);
}

// A store that breaks where one rank uses it.
class BreakingStore final : public Store {
 public:
  BreakingStore(Store& store, std::string set, std::string get)
      : store_(store), set_(std::move(set)), get_(std::move(get)) {}
  void set(const std::string& key, const std::string& value) override {
    breakAt(set_, key);
    store_.set(key, value);
  }
  std::optional<std::string> get(const std::string& key) override {
    breakAt(get_, key);
    return store_.get(key);
  }
  void remove(const std::string& key) override { store_.remove(key); }

 private:
  static void breakAt(const std::string& where, const std::string& key) {
    if (!where.empty() && key.find(where) != std::string::npos)
      throw std::runtime_error("the store broke");
  }
  Store& store_;
  const std::string set_, get_;
};

// Stops the process at the first look for such a key.
class StoppingStore final : public Store {
 public:
  StoppingStore(Store& store, std::string at) : store_(store), at_(std::move(at)) {}
  void set(const std::string& key, const std::string& value) override { store_.set(key, value); }
  std::optional<std::string> get(const std::string& key) override {
    if (key.find(at_) != std::string::npos && !std::exchange(has_stopped_, true)) raise(SIGSTOP);
    return store_.get(key);
  }
  void remove(const std::string& key) override { store_.remove(key); }

 private:
  Store& store_;
  const std::string at_;
  bool has_stopped_ = false;
};

// More messages than are taken from a socket before anybody looks for them.
constexpr int kMany = 40;
void sendManyAndDie(Group& group) {
  for (int i = 0; i < kMany; ++i) messages::send(group, 0, 0, letter(0, 0, kEagerBytes));
  sleepMs(500);
  raise(SIGKILL);
}

}  // namespace

TEST(a_connection_for_messages_that_breaks_between_the_living_ends_the_group) {
  overSockets(2, [](Group& group) {
    const Letter data = letter(0, 0, 100);
    group.run({Barrier{}});
    const std::set<int> before = connections();
    if (group.rank() == 0) messages::send(group, 1, 0, data);
    if (group.rank() == 1) CHECK(messages::receive(group, 0, 0, 100) == data);
    group.run({Barrier{}});
    if (group.rank() == 0) {
      std::set<int> added = connections();
      for (int fd : before) added.erase(fd);
      CHECK_EQ(added.size(), size_t{1});
      shutdown(*added.begin(), SHUT_RDWR);
      waitForFailure(group);
      return;
    }
    CHECK(failureOf([&] { messages::receive(group, 0, 1, 100); }, "is lost: ") ==
          Failure::kPeerLost);
  });
}

TEST(who_dies_is_missed_by_collectives_whatever_messages_are_unread) {
  overSockets(2,
              [](Group& group) {
                if (group.rank() == 1) sendManyAndDie(group);
                float x = 0;
                CHECK(failureOf([&] { group.run({Broadcast{&x, 1, DType::kFloat32, 1}}); },
                                "is lost: its process ended") == Failure::kPeerLost);
              },
              60 * kSecond, {1});
}

TEST(messages_of_a_rank_that_died_since_are_received) {
  overSockets(2,
              [](Group& group) {
                if (group.rank() == 1) sendManyAndDie(group);
                while (!group.epoch()->peers().states()[1].isLost()) sleepMs(1);
                for (int i = 0; i < kMany; ++i)
                  CHECK(messages::receive(group, 1, 0, kEagerBytes) == letter(0, 0, kEagerBytes));
                CHECK(failureOf([&] { messages::receive(group, 1, 0, 1); },
                                "is lost: its process ended") == Failure::kPeerLost);
              },
              60 * kSecond, {1});
}

TEST(a_group_is_made_by_all_ranks_or_by_none) {
  struct Case {
    int victim;
    std::string set, get;
  };
  // At the rendezvous, and at the control ring.
  for (const Case& c :
       {Case{0, "", "/failed"}, {1, "", "/failed"}, {2, "", "/failed"}, {0, "", "/rank/1"}}) {
    const processes::Ends ends = onHosts("aabb", [&](int r, Store& store) {
      BreakingStore breaking(store, c.set, c.get);
      Group::create(r == c.victim ? static_cast<Store&>(breaking) : store, r, 4,
                    {.name = "test", .timeout = 30 * kSecond});
    });
    for (const std::string& end : ends) CHECK(end.find("the store broke") != std::string::npos);
  }
}

// All name it, wherever it stands in the ring, and it learns the same when it goes on.
TEST(a_rank_that_is_stopped_while_a_group_is_made_is_named_by_all) {
  struct Case {
    int victim;
    std::string get;
  };
  // At the rendezvous, and before the control ring.
  const std::vector<Case> cases{{0, "/rank/1"}, {0, "/failed"}, {1, "/failed"}, {3, "/failed"}};
  auto& pids = shared<std::atomic<pid_t>[4]>();
  auto& ended = shared<std::atomic<int>[4]>();
  const auto groups = onHostsAtOnce(cases.size(), "aabb", [&](size_t i, int r, Store& store) {
    const Case& c = cases[i];
    StoppingStore stopping(store, c.get);
    if (r == c.victim) pids[i] = getpid();
    CHECK(failureOf(
              [&] {
                Group::create(r == c.victim ? static_cast<Store&>(stopping) : store, r, 4,
                              {.name = "test", .timeout = 3 * kSecond});
              },
              "rank " + std::to_string(c.victim) + " ") == Failure::kTimeout);
    if (r != c.victim && ++ended[i] == 3) kill(pids[i], SIGCONT);
  });
  for (const processes::Ends& ends : groups)
    for (const std::string& end : ends) CHECK_EQ(end, "");
}

TEST(a_rank_leaves_within_its_timeout_beside_a_stopped_one) {
  auto& ready = shared<std::atomic<int>>();
  auto& left = shared<std::atomic<int>>();
  auto& pid = shared<std::atomic<pid_t>>();
  overSockets(3, [&](Group& group) {
    if (group.rank() == 2) pid = getpid();
    group.run({Barrier{}});
    for (++ready; ready < 3;) sleepMs(1);
    if (group.rank() == 2) {
      raise(SIGSTOP);
      return;
    }
    awaitStopped(pid);  // else SIGCONT could come before SIGSTOP
    group.setTimeout(kSecond);
    const Nanos began = monotonicNow();
    group.shutdown();
    const Nanos took = monotonicNow() - began;
    if (++left == 2) kill(pid, SIGCONT);
    CHECK(took < 4 * kSecond);
  });
}

TEST(what_ends_a_group_ends_the_one_inside_its_host) {
  auto& done = shared<std::atomic<int>>();
  for (const bool abort : {false, true}) {
    done = 0;
    const processes::Ends ends = onHosts("aab", [&](int r, Store& store) {
      const auto group = Group::create(store, r, 3, {.name = "test", .timeout = 30 * kSecond});
      const std::shared_ptr<Group> local = group->local();
      group->run({Barrier{}});
      // An abort would fail the barrier of whoever is still in it.
      for (++done; done < 3;) sleepMs(1);
      if (abort && r != 0) {
        while (!group->failed() || (r == 1 && !local->failed())) sleepMs(1);
        return;
      }
      if (abort) {
        group->abort("enough");
        CHECK(local->failed());
        return;
      }
      group->shutdown();
      float x = 1;
      CHECK(failureOf([&] { local->run({AllReduce{&x, 1, DType::kFloat32, ReduceOp::kSum}}); }) !=
            Failure::kNone);
    });
    for (const std::string& end : ends) CHECK_EQ(end, "");
  }
}

namespace {

// To how many ranks it goes through memory.
std::ptrdiff_t pipesOf(Group& group) {
  const std::vector<std::string> routes = group.epoch()->wires->routes();
  return std::ranges::count_if(
      routes, [](const std::string& route) { return route.ends_with(": shared memory"); });
}

// Every rank sends to every other one.
void gather(Group& group, size_t count) {
  const auto P = static_cast<size_t>(group.size());
  std::vector<float> mine(count, static_cast<float>(group.rank())), all(P * count);
  AllGather call{.input = mine.data(), .dtype = DType::kFloat32};
  for (size_t r = 0; r < P; ++r) {
    call.outputs.push_back(&all[r * count]);
    call.counts.push_back(count);
  }
  group.run({call});
  for (size_t i = 0; i < all.size(); ++i) CHECK_EQ(all[i], static_cast<float>(i / count));
}

// Memory is then refused: it is larger than a file of this process may be.
void limitFiles() {
  signal(SIGXFSZ, SIG_IGN);
  const rlimit small{.rlim_cur = 4096, .rlim_max = 4096};
  CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0);
}

}  // namespace

TEST(a_rank_of_this_host_that_dies_is_named_by_those_that_share_its_memory) {
  const processes::Ends ends = onHosts("aaab", [](int r, Store& store) {
    const auto group = Group::create(store, r, 4, {.name = "test", .timeout = 60 * kSecond});
    gather(*group, 100);
    gather(*group, 1'000'000);
    CHECK_EQ(pipesOf(*group) > 0, r < 3);
    if (r == 1) raise(SIGKILL);
    const auto goOn = [&] {
      for (;;) gather(*group, 1'000'000);
    };
    CHECK(failureOf(goOn, "rank 1 (") == Failure::kPeerLost);
    CHECK(failureOf(goOn, "its process ended") == Failure::kPeerLost);
  });
  for (size_t r = 0; r < ends.size(); ++r) CHECK_EQ(ends[r] == "", r != 1);
}

TEST(a_rank_that_has_no_memory_to_share_is_named_by_all) {
  for (const int refused : {0, 1, 2, 3}) {
    const processes::Ends ends = onHosts("aabb", [&](int r, Store& store) {
      if (r == refused) limitFiles();
      CHECK(
          failureOf([&] { Group::create(store, r, 4, {.name = "test", .timeout = 30 * kSecond}); },
                    "rank " + std::to_string(refused) + " (pid ") == Failure::kSetup);
    });
    for (const std::string& end : ends) CHECK_EQ(end, "");
  }
}

TEST(ranks_of_a_host_that_cannot_share_memory_use_sockets) {
  for (const int refused : {-1, 2, 3}) {
    const processes::Ends ends = onHosts("aabb", [&](int r, Store& store) {
      if (r == refused) limitFiles();
      SharedOptions shared;
      shared.on_loss = OnLoss::kContinue;
      const auto group =
          Group::create(std::shared_ptr<Store>(std::shared_ptr<Store>(), &store), r, 4,
                        {.name = "test", .timeout = 30 * kSecond, .shared = shared});
      gather(*group, 1000);
      gather(*group, 100'000);
      CHECK_EQ(pipesOf(*group) > 0, refused < 0 || r < 2);
    });
    for (const std::string& end : ends) CHECK_EQ(end, "");
  }
}

TEST(nobody_waits_for_messages_of_a_group_that_has_failed) {
  auto& pids = shared<std::atomic<pid_t>[2]>();
  overSockets(2, [&](Group& group) {
    pids[group.rank()] = getpid();
    group.run({Barrier{}});
    if (group.rank() == 1) {
      raise(SIGSTOP);
      return;
    }
    awaitStopped(pids[1]);
    group.setTimeout(kSecond);
    // A rank that is stopped lets nobody in.
    messages::send(group, 1, 0, letter(0, 0, 100));
    CHECK(failureOf([&] { messages::receive(group, 1, 0, 100); }) == Failure::kTimeout);
    const Nanos began = now();
    group.shutdown();
    const Nanos took = now() - began;
    kill(pids[1], SIGCONT);
    CHECK(took < 20 * kSecond);
  });
}

TEST(who_was_stopped_itself_blames_nobody_for_being_late) {
  auto& stopped = shared<std::atomic<pid_t>>();
  overSockets(2, [&](Group& group) {
    group.setTimeout(2 * kSecond);
    float x = 0;
    if (group.rank() == 0) {
      while (stopped == 0) sleepMs(1);
      kill(stopped, SIGSTOP);
      CHECK(failureOf([&] { group.run({Broadcast{&x, 1, DType::kFloat32, 1}}); }, "rank 1 ") ==
            Failure::kTimeout);
      sleepMs(500);
      kill(stopped, SIGCONT);
      return;
    }
    Letter data(8);
    const auto delivery = messages::post(group, Message::Direction::kReceive, 0, 0, data);
    stopped = getpid();
    CHECK(failureOf([&] { messages::waitFor(group, delivery); },
                    "noticed by rank 0, learned by rank 1") == Failure::kTimeout);
  });
}

TEST(what_cannot_be_read_of_one_ranks_settings_is_told_to_all) {
  struct Case {
    const char *name, *value, *text;
  };
  for (const Case& c : {Case{"RINGREDUCE_LOST_SECONDS", "0",
                             "is not a number of seconds from 0.5 to 3600; correct"},
                        {"RINGREDUCE_LOG", "debug", "can be 'info' only; correct"},
                        {"RINGREDUCE_IF", " ,", "' ,' is neither an interface's name"},
                        {"RINGREDUCE_LANES", "65", "is not a whole number from 0 to 64; correct"},
                        {"RINGREDUCE_PORTS", "5-4", "is no range of ports"}})
    for (const int whose : {0, 1}) {
      const processes::Ends ends = onHosts("abc", [&](int r, Store& store) {
        if (r == whose) setenv(c.name, c.value, 1);
        Group::create(store, r, 3, {.name = "test", .timeout = 30 * kSecond});
      });
      std::string setting = c.name;
      setting += '=';
      setting += c.value;
      for (const std::string& end : ends) {
        CHECK(end.starts_with("rank " + std::to_string(whose) + " (pid"));
        CHECK(end.find(setting) != std::string::npos);
        CHECK(end.find(c.text) != std::string::npos);
      }
    }
}

// As where the process of rank 0 holds the store and ends with its error.
TEST(why_no_group_is_made_is_known_to_all_before_the_store_goes) {
  class Passing final : public Store {
   public:
    Passing(Store& store, const std::atomic<bool>& over, int pause_ms, std::string fails_at)
        : store_(store), over_(over), pause_ms_(pause_ms), fails_at_(std::move(fails_at)) {}
    void set(const std::string& key, const std::string& value) override {
      look();
      store_.set(key, value);
    }
    std::optional<std::string> get(const std::string& key) override {
      sleepMs(pause_ms_);  // slower than rank 0
      look();
      if (!fails_at_.empty() && key.ends_with(fails_at_)) {
        fails_at_.clear();
        throw Error(Failure::kSetup, "no such answer");
      }
      return store_.get(key);
    }
    void remove(const std::string& key) override { store_.remove(key); }

   private:
    void look() const {
      if (over_) throw Error(Failure::kSetup, "the store failed");
    }
    Store& store_;
    const std::atomic<bool>& over_;
    const int pause_ms_;
    std::string fails_at_;  // once
  };
  struct Case {
    const char* name;
    std::vector<const char*> values;  // by rank
    const char* words;
    int fails = -1;  // this rank, while it waits for connections
  };
  const char* orders = "RINGREDUCE_RING is not set at rank 0 (pid ";
  const std::vector<Case> cases{
      {"RINGREDUCE_PORTS", {"1-0", "", ""}, "RINGREDUCE_PORTS=1-0"},
      {"RINGREDUCE_PORTS", {"", "", "1-0"}, "RINGREDUCE_PORTS=1-0"},
      {"RINGREDUCE_RING", {"", "0,2,1", "0,2,1"}, orders},
      {"RINGREDUCE_RING", {"", "", "0,2,1"}, orders},
      {"RINGREDUCE_RING", {"0,1", "0,1", "0,1"}, "is no order for group 'test'"},
      {"RINGREDUCE_TLS", {"1", "", ""}, net::Tls::isBuiltIn() ? "1 is set on rank 0 (pid " : ""},
      {"RINGREDUCE_TLS", {"", "", "1"}, net::Tls::isBuiltIn() ? "1 is set on rank 2 (pid " : ""},
      {"RINGREDUCE_LOG", {"", "", ""}, "(no such answer)", 0},
      {"RINGREDUCE_LOG", {"", "", ""}, "(no such answer)", 1}};
  auto& gone = shared<std::atomic<bool>[9]>();
  auto& here = shared<std::atomic<int>[9]>();
  const auto groups = onHostsAtOnce(cases.size(), "abc", [&](size_t i, int r, Store& store) {
    const Case& c = cases[i];
    const ranks::Setting setting(c.name, c.values[static_cast<size_t>(r)]);
    Passing passing(store, gone[i], std::vector{0, 20, 100}[static_cast<size_t>(r)],
                    r == c.fails ? "/failed" : "");
    // All begin together, since rank 0 waits only briefly for the others to read its error.
    ++here[i];
    ranks::await("all ranks have begun", [&] { return here[i] == 3; });
    try {
      Group::create(passing, r, 3, {.name = "test", .timeout = 30 * kSecond});
    } catch (...) {
      if (r == 0) gone[i] = true;
      throw;
    }
  });
  for (size_t i = 0; i < cases.size(); ++i)
    for (const std::string& end : groups[i]) CHECK(end.find(cases[i].words) != std::string::npos);
}

TEST(a_store_that_goes_is_an_error_of_a_named_rank) {
  class Gone final : public Store {
   public:
    void set(const std::string&, const std::string&) override { fail(); }
    std::optional<std::string> get(const std::string&) override { fail(); }
    void remove(const std::string&) override { fail(); }

   private:
    [[noreturn]] static void fail() { throw Error(Failure::kSetup, "the store failed"); }
  } store;
  for (const int rank : {0, 1})
    CHECK(failureOf([&] { Group::create(store, rank, 2, {.name = "test"}); },
                    "rank " + std::to_string(rank) + " (pid ") == Failure::kSetup);
  CHECK(failureOf([&] { Group::create(store, 1, 2, {.name = "test"}); },
                  "lost the store while group 'test' was being made; has rank 0") ==
        Failure::kSetup);
}

// Whoever can open nothing more is to be named, not the rank that it would have called.  The
// sanitizer of addresses needs descriptors itself.
#ifndef __SANITIZE_ADDRESS__
TEST(who_has_no_descriptors_left_is_the_one_that_is_lost) {
  for (const bool message : {false, true})
    overSockets(3, [&](Group& group) {
      if (group.rank() == 1) {  // before it has made a connection
        const int next = dup(0);
        close(next);
        rlimit limit{};
        getrlimit(RLIMIT_NOFILE, &limit);
        limit.rlim_cur = static_cast<rlim_t>(next);
        setrlimit(RLIMIT_NOFILE, &limit);
        if (message) messages::send(group, 2, 0, letter(0, 0, 100));
      }
      std::vector<float> data(1000);
      const auto goOn = [&] {
        if (message && group.rank() == 2) messages::receive(group, 1, 0, 100);
        for (;;) group.run({AllReduce{data.data(), data.size(), DType::kFloat32, ReduceOp::kSum}});
      };
      CHECK(failureOf(goOn, "rank 1 (") == Failure::kPeerLost);
      CHECK(failureOf(goOn, "is lost: no socket can be made") == Failure::kPeerLost);
      CHECK(failureOf(goOn, "raise ulimit -n") == Failure::kPeerLost);
    });
}

TEST(a_rank_without_descriptors_does_not_look_as_if_it_had_ended) {
  const ranks::Setting wire("RINGREDUCE_WIRE", "tcp");
  for (rlim_t spare = 1; spare < 10; ++spare) {
    auto& done = shared<std::atomic<bool>>();
    processes::SharedStore store;
    const auto ends = processes::run(2, [&](int r) {
      if (r == 1) {
        const int next = dup(0);
        close(next);
        rlimit limit{};
        getrlimit(RLIMIT_NOFILE, &limit);
        limit.rlim_cur = static_cast<rlim_t>(next) + spare;
        setrlimit(RLIMIT_NOFILE, &limit);
      }
      std::string failure;
      try {
        const GroupOptions options{.name = "test", .timeout = 3 * kSecond};
        const auto group = Group::create(store, r, 2, options);
        std::vector<float> data(1000);
        group->run({AllReduce{data.data(), data.size(), DType::kFloat32, ReduceOp::kSum}});
      } catch (const Error& error) {
        failure = error.what();
      }
      if (r == 0) done = true;
      while (!done) sleepMs(1);
      if (r == 0) CHECK_EQ(failure.find("its process ended"), std::string::npos);
    });
    for (const std::string& end : ends) CHECK_EQ(end, "");
  }
}
#endif
