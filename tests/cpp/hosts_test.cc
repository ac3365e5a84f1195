// Ranks that pose as several hosts: who is where, groups of each host, entries of earlier runs, and
// ranks that do not come.
#include "bootstrap/hosts.h"

#include <algorithm>

#include "bootstrap/meeting.h"
#include "check.h"
#include "processes.h"
#include "ranks.h"

using namespace ringreduce;
using ranks::failureOf;

namespace {

GroupOptions patience(Nanos timeout) {
  return {.name = "test", .timeout = timeout};
}

// Of all ranks, nothing but empty entries.
void expectLeft(ranks::MemoryStore& store) {
  CHECK(!store.get("ringreduce/hosts"));
  for (size_t r = 0; r < store.size(); ++r)
    CHECK_EQ(store.get("ringreduce/hosts/" + std::to_string(r)).value_or("none"), "");
}

// Runs body(hosts, store) in a process for each rank; rank r is on the host of that letter.
using Body = std::function<void(const Hosts&, Store&)>;
void onHosts(const std::string& hosts, const Body& body, Store* with = nullptr) {
  processes::SharedStore own;
  Store& store = with ? *with : own;
  const auto size = static_cast<int>(hosts.size());
  const auto ends = processes::run(size, [&](int r) {
    const ranks::Setting host("RINGREDUCE_HOSTID", hosts.substr(static_cast<size_t>(r), 1));
    body(Hosts::meet(store, r, size, patience(20 * kSecond)), store);
  });
  for (const std::string& end : ends) CHECK_EQ(end, "");
}

}  // namespace

TEST(ranks_learn_who_shares_their_host) {
  onHosts("abacb", [](const Hosts& hosts, Store&) {
    CHECK_EQ(hosts.size(), 5);
    CHECK_EQ(hosts.count(), 3);
    const std::vector<int> of{0, 1, 0, 2, 1}, place{0, 0, 1, 0, 1};
    for (int r = 0; r < 5; ++r) {
      CHECK_EQ(hosts.hostOf(r), of[static_cast<size_t>(r)]);
      CHECK_EQ(hosts.placeOf(r), place[static_cast<size_t>(r)]);
      CHECK(hosts.who(r).starts_with("rank " + std::to_string(r) + " (pid "));
    }
    CHECK(hosts.ranksOn(1) == (std::vector<int>{1, 4}));
    CHECK(!hosts.even());
  });
}

TEST(without_another_name_a_machine_is_one_host) {
  ranks::MemoryStore store;
  ranks::inThreads(3, [&](int r) {
    const Hosts hosts = Hosts::meet(store, r, 3, patience(20 * kSecond));
    CHECK_EQ(hosts.count(), 1);
    CHECK(hosts.even());
    CHECK_EQ(hosts.placeOf(r), r);
    CHECK_EQ(hosts.word().size(), 16u);
  });
  expectLeft(store);
}

TEST(each_host_has_a_group_whose_errors_have_the_whole_groups_numbers) {
  onHosts("abab", [](const Hosts& hosts, Store& store) {
    CHECK(hosts.even());
    const auto group = Group::ofHost(hosts, store, patience(20 * kSecond));
    CHECK_EQ(group->size(), 2);
    CHECK_EQ(group->rank(), hosts.rank() / 2);
    float sum = static_cast<float>(hosts.rank());
    group->run({AllReduce{&sum, 1, DType::kFloat32, ReduceOp::kSum}});
    CHECK_EQ(sum, hosts.rank() % 2 == 0 ? 2.0f : 4.0f);
    CHECK(group->who(1).starts_with("rank " + std::to_string(2 + hosts.rank() % 2) + " (pid"));
  });
}

TEST(what_an_earlier_run_left_is_not_taken_for_this_one) {
  ranks::MemoryStore store;
  // Rank 2 of an earlier run came, and rank 0 of another had let all go on.
  store.set("ringreduce/hosts/2", encode({{"version", kVersion},
                                          {"size", "3"},
                                          {"token", "old"},
                                          {"id", "elsewhere"},
                                          {"pid", "1"},
                                          {"host", "b"}}));
  store.set("ringreduce/hosts",
            encode({{"go", "1"}, {"word", "old"}, {"token1", "old"}, {"token2", "old"}}));
  std::vector<std::string> words(3);
  ranks::inThreads(3, [&](int r) {
    if (r == 2) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    const Hosts hosts = Hosts::meet(store, r, 3, patience(20 * kSecond));
    CHECK_EQ(hosts.count(), 1);
    words[static_cast<size_t>(r)] = hosts.word();
  });
  CHECK(words[0] != "old" && words[0] == words[1] && words[1] == words[2]);
  expectLeft(store);
}

TEST(groups_meet_one_after_the_other_on_the_same_store) {
  ranks::MemoryStore store;
  ranks::inThreads(4, [&](int r) {
    for (int i = 0; i < 20; ++i)
      CHECK_EQ(Hosts::meet(store, r, 4, patience(20 * kSecond)).size(), 4);
  });
  expectLeft(store);
}

TEST(who_does_not_come_is_named_by_all) {
  ranks::MemoryStore store;
  ranks::inThreads(4, [&](int r) {
    if (r == 1 || r == 3) return;
    CHECK(failureOf([&] { Hosts::meet(store, r, 4, patience(300 * kMillisecond)); },
                    "ranks 1 and 3 of 4 did not join within 0.3 s, making group 'test'") ==
          Failure::kTimeout);
  });
  // Nobody tells the others if it is rank 0 that is missing.
  CHECK(failureOf([&] { Hosts::meet(store, 2, 3, patience(100 * kMillisecond)); }, "rank") ==
        Failure::kTimeout);
}

TEST(two_processes_of_one_number_end_it_for_all) {
  for (int claimed : {0, 1}) {
    ranks::MemoryStore store;
    const Nanos begin = now();
    ranks::inThreads(claimed + 2, [&](int t) {  // those that are missing are not waited for
      const int rank = std::min(t, claimed);
      CHECK(failureOf([&] { Hosts::meet(store, rank, 4, patience(60 * kSecond)); },
                      "two processes claim rank " + std::to_string(claimed)) == Failure::kSetup);
    });
    CHECK(now() - begin < 30 * kSecond);
    // What is left of it is no matter to the next meeting.
    ranks::inThreads(
        3, [&](int r) { CHECK_EQ(Hosts::meet(store, r, 3, patience(20 * kSecond)).size(), 3); });
  }
}

TEST(another_world_size_ends_it_for_all_at_once) {
  ranks::MemoryStore store;
  const Nanos begin = now();
  ranks::inThreads(3, [&](int r) {
    CHECK(failureOf([&] { Hosts::meet(store, r, r == 2 ? 4 : 3, patience(60 * kSecond)); },
                    "was started with world size 4, rank 0 with 3") == Failure::kSetup);
  });
  CHECK(now() - begin < 30 * kSecond);
}
