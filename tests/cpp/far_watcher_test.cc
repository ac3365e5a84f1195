// What ranks on several hosts tell each other when an operation takes long, without any GPU: an
// operation here is a switch.
#include "cuda/far_watcher.h"

#include <array>
#include <atomic>

#include "check.h"
#include "ranks.h"

using namespace ringreduce;
using namespace ringreduce::cuda;
using ranks::failureOf;

namespace {

constexpr Nanos kSoon = 100 * kMillisecond;

// A store whose calls fail once it is gone.
class MortalStore final : public Store {
 public:
  std::atomic<bool> gone{false};
  void set(const std::string& key, const std::string& value) override { live().set(key, value); }
  std::optional<std::string> get(const std::string& key) override { return live().get(key); }
  void remove(const std::string& key) override { live().remove(key); }

 private:
  ranks::MemoryStore& live() {
    if (gone) throw std::runtime_error("the store is gone");
    return store_;
  }
  ranks::MemoryStore store_;
};

// Of one rank.
struct Rank {
  Rank(std::shared_ptr<MortalStore> store, int r, int size)
      : group{.name = "test", .timeout = 20 * kSecond},
        hosts(Hosts::meet(*store, r, size, group)),
        watcher(store, hosts, group,
                {.probe = [this]() -> std::optional<FarTrouble> {
                   if (!broken) return std::nullopt;
                   return FarTrouble{Failure::kPeerLost, "NCCL says so", true};
                 },
                 .let_go =
                     [this](const std::string&) {
                       begun = done = true;
                       ++let_go;
                     },
                 .word_after = kSoon}) {}

  void start(uint64_t count, Nanos timeout = 20 * kSecond, bool has_begun = true) {
    const uint64_t n = watcher.announce({.count = count,
                                         .kind = Kind::kAllReduce,
                                         .dtype = DType::kFloat32,
                                         .op = static_cast<uint8_t>(ReduceOp::kSum)});
    begun = has_begun;
    watcher.entrust(n, timeout, [this] { return begun.load(); }, [this] { return done.load(); });
  }
  Failure ends(const std::string& words) {
    return failureOf([&] { watcher.wait(20 * kSecond); }, words);
  }

  const GroupOptions group;
  const Hosts hosts;
  std::atomic<bool> begun{true}, done{false}, broken{false};
  std::atomic<int> let_go{0};
  FarWatcher watcher;  // last: its threads use the rest
};

void inRanks(int size, const std::function<void(Rank&, MortalStore&)>& body) {
  const auto store = std::make_shared<MortalStore>();
  std::atomic<int> here{0}, over{0};
  ranks::inThreads(size, [&](int r) {
    Rank rank(store, r, size);
    for (++here; here < size;) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const auto await_all = [&] {
      for (++over; over < size;) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
    try {
      body(rank, *store);
    } catch (...) {
      await_all();
      throw;
    }
    await_all();  // who leaves early is not to be missed
  });
}

}  // namespace

TEST(operations_that_end_are_waited_for_and_leave_nothing_to_read) {
  const auto store = std::make_shared<MortalStore>();
  std::vector<std::string> words(2);
  ranks::inThreads(2, [&](int r) {
    Rank rank(store, r, 2);
    std::string& word = words[static_cast<size_t>(r)];
    word = "ringreduce/" + rank.hosts.word() + "/at/" + std::to_string(r);
    for (int i = 0; i < 3; ++i) {
      rank.done = false;
      rank.start(100);
      CHECK(!rank.watcher.wait(0));
      // The first is told in the store.
      while (i == 0 && store->get(word).value_or("").empty())
        CHECK(!rank.watcher.wait(kMillisecond));
      rank.done = true;
      CHECK(rank.watcher.wait(20 * kSecond));
    }
    rank.watcher.check();
    CHECK(rank.watcher.settle(0));
    CHECK_EQ(rank.let_go.load(), 0);
  });
  for (const std::string& word : words) CHECK_EQ(store->get(word).value_or("none"), "");
}

TEST(a_timeout_names_who_did_not_come_and_all_tell_the_same) {
  std::atomic<int> told{0};
  inRanks(4, [&](Rank& rank, MortalStore&) {
    const bool absent = rank.hosts.rank() == 1 || rank.hosts.rank() == 3;
    while (absent && told < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    rank.start(100, 6 * kSoon);  // who comes too late learns it a little later
    CHECK(rank.ends("rank 1 (pid ") == Failure::kTimeout);
    ++told;
    CHECK(rank.ends(", rank 3 (pid ") == Failure::kTimeout);
    CHECK(rank.ends("did not arrive: GPU all_reduce #0") == Failure::kTimeout);
  });
}

TEST(who_has_other_work_before_it_is_behind) {
  inRanks(2, [](Rank& rank, MortalStore&) {
    rank.start(100, 8 * kSoon, rank.hosts.rank() == 0);
    CHECK(rank.ends("came, but with other work in its stream before it") == Failure::kTimeout);
    CHECK(rank.ends("rank 1 (pid") == Failure::kTimeout);
    CHECK(rank.ends("all_reduce #0 (float32, 100 elements, SUM) timed out after a timeout of "
                    "0.8 s, in group 'test'; noticed by rank 0") == Failure::kTimeout);
    CHECK_EQ(rank.let_go.load(), 1);
  });
}

TEST(when_all_have_come_nobody_is_blamed) {
  inRanks(3, [](Rank& rank, MortalStore&) {
    rank.start(100, 8 * kSoon);
    CHECK(rank.ends("all ranks came") == Failure::kTimeout);
  });
}

TEST(time_counts_from_when_the_stream_has_come_to_it) {
  inRanks(1, [](Rank& rank, MortalStore&) {
    rank.start(100, kSoon, false);
    CHECK(!rank.watcher.wait(8 * kSoon));
    rank.begun = true;
    CHECK(rank.ends("timed out") == Failure::kTimeout);
  });
}

TEST(ranks_that_wait_in_different_operations_are_told) {
  inRanks(3, [](Rank& rank, MortalStore&) {
    rank.start(rank.hosts.rank() == 2 ? 101 : 100);
    CHECK(rank.ends("ranks disagree on GPU operation #0") == Failure::kMismatch);
    CHECK(rank.ends("100 elements") == Failure::kMismatch);
    CHECK(rank.ends("101 elements") == Failure::kMismatch);
  });
}

TEST(an_abort_reaches_those_who_wait) {
  inRanks(3, [](Rank& rank, MortalStore&) {
    if (rank.hosts.rank() == 1)
      rank.watcher.abort("for a test");
    else
      rank.start(100);
    CHECK(rank.ends("rank 1 (pid") == Failure::kAborted);
    CHECK(rank.ends("aborted group 'test': for a test; noticed by rank 1") == Failure::kAborted);
    CHECK(failureOf([&] { rank.start(1); }, "for a test") == Failure::kAborted);
  });
}

// NCCL says that a rank is gone, but not which; whoever knows is believed.
TEST(who_only_guesses_lets_others_tell_first) {
  inRanks(3, [](Rank& rank, MortalStore&) {
    rank.start(100);
    if (rank.hosts.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      CHECK(failureOf([&] { rank.watcher.fail(Failure::kPeerLost, 2, "rank 2 was killed"); }) ==
            Failure::kPeerLost);
    } else {
      rank.broken = true;
    }
    CHECK(rank.ends("rank 2 was killed; noticed by rank 1") == Failure::kPeerLost);
  });
  inRanks(2, [](Rank& rank, MortalStore&) {
    rank.start(100);
    rank.broken = true;
    CHECK(rank.ends("NCCL says so; noticed by rank") == Failure::kPeerLost);
    CHECK_EQ(rank.let_go.load(), 1);
  });
}

TEST(without_a_store_each_rank_still_ends) {
  inRanks(2, [](Rank& rank, MortalStore& store) {
    rank.start(100, 6 * kSoon);
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    store.gone = true;
    CHECK(rank.ends("who is late is not known, since the store does not answer") ==
          Failure::kTimeout);
  });
}

TEST(a_gpu_that_fails_ends_it_for_all) {
  inRanks(2, [](Rank& rank, MortalStore&) {
    if (rank.hosts.rank() == 0) {
      rank.start(100);
    } else {
      const uint64_t n = rank.watcher.announce({.count = 100, .kind = Kind::kAllReduce});
      rank.watcher.entrust(
          n, kSecond, [] { return true; },
          []() -> bool { throw Error(Failure::kSetup, "the GPU has failed"); });
    }
    CHECK(rank.ends("gave up: the GPU has failed") == Failure::kAborted);
  });
}
