// The rendezvous: which ranks share a host, their memory, records of earlier runs, ranks that do
// not come.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

#include "bootstrap/host_memory.h"
#include "bootstrap/process.h"
#include "bootstrap/rendezvous.h"
#include "bootstrap/topology.h"
#include "bootstrap/unix_socket.h"
#include "check.h"
#include "processes.h"
#include "ranks.h"

using namespace ringreduce;
using ranks::failureOf;

namespace {

GroupOptions patience(Nanos timeout) {
  return {.name = "test", .timeout = timeout};
}

Rendezvous met(Store& store, int rank, int size, Nanos timeout = 20 * kSecond) {
  return rendezvous(store, rank, size, patience(timeout),
                    [&](const Hosts&) { return "told " + std::to_string(rank); });
}

// Runs body(hosts, store) in a process for each rank; rank r is on the host of that letter.
using Body = std::function<void(const Hosts&)>;
void onHosts(const std::string& letters, const Body& body) {
  processes::SharedStore store;
  const auto size = static_cast<int>(letters.size());
  const auto ends = processes::run(size, [&](int r) {
    const ranks::Setting host("RINGREDUCE_HOSTID", letters.substr(static_cast<size_t>(r), 1));
    body(*met(store, r, size).hosts);
  });
  for (const std::string& end : ends) CHECK_EQ(end, "");
}

}  // namespace

TEST(ranks_learn_which_ranks_share_their_host) {
  onHosts("abacb", [](const Hosts& hosts) {
    CHECK_EQ(hosts.size(), 5);
    CHECK_EQ(hosts.count(), 3);
    const std::vector<int> of{0, 1, 0, 2, 1}, place{0, 0, 1, 0, 1};
    for (int r = 0; r < 5; ++r) {
      CHECK_EQ(hosts.hostOf(r), of[static_cast<size_t>(r)]);
      CHECK_EQ(hosts.localRankOf(r), place[static_cast<size_t>(r)]);
      CHECK_EQ(hosts.settingsOf(r), "told " + std::to_string(r));
      CHECK(hosts.who(r).starts_with("rank " + std::to_string(r) + " (pid "));
    }
    CHECK(hosts.ranksOn(1) == (std::vector<int>{1, 4}));
    CHECK(!hosts.even());
  });
}

TEST(ranks_are_named_by_both_numbers_after_a_reconfigure) {
  const GroupOptions options{.name = "test", .started_as = {0, 2, 3}};
  CHECK_EQ(options.shown(0), "0");
  CHECK_EQ(options.rankList({1}), "rank 1 (started as 2)");
  CHECK_EQ(options.rankList({0, 1, 2}), "ranks 0, 1 (started as 2) and 2 (started as 3)");
  const GroupOptions some = options.ofRanks({2, 0});
  CHECK_EQ(some.rankList({0, 1}), "ranks 2 (started as 3) and 0");
}

TEST(the_ranks_of_a_host_share_memory_and_are_named_by_the_whole_groups_numbers) {
  onHosts("abab", [](const Hosts& hosts) {
    CHECK(hosts.even());
    const LocalRanks ranks =
        hosts.memoryExchange("test", SharedOptions::fromEnvironment(2), patience(20 * kSecond));
    CHECK_EQ(ranks.rank, hosts.rank() / 2);
    CHECK_EQ(ranks.options.shown(1), std::to_string(2 + hosts.rank() % 2));
    const HostMemory host_memory = shareMemory(ranks, [](int) {});
    CHECK_EQ(host_memory.members.size(), 2u);
    std::atomic_ref sum(pageOf(host_memory, 0).posted.value);
    sum += static_cast<uint64_t>(hosts.rank() + 1);
    while (sum != (hosts.rank() % 2 == 0 ? uint64_t{4} : uint64_t{6})) std::this_thread::yield();
  });
}

TEST(without_another_name_a_machine_is_one_host_and_leaves_nothing_in_the_store) {
  ranks::MemoryStore store;
  ranks::inThreads(4, [&](int r) {
    for (int i = 0; i < 20; ++i) {
      const Rendezvous all = met(store, r, 4);
      CHECK(!all.hosts);
      CHECK_EQ(all.host_memory.members.size(), 4u);
    }
  });
  CHECK_EQ(store.size(), 0u);
}

TEST(records_of_an_earlier_run_are_not_taken_for_this_one) {
  // Rank 2 of an earlier run came, on this host or another; rank 0 had published a table, and a
  // stale one says that all ranks met.
  for (const std::string& where : {hostId(), std::string("elsewhere")}) {
    ranks::MemoryStore store;
    store.set("ringreduce/rank/2", encode({{"version", kVersion},
                                           {"size", "3"},
                                           {"token", "old"},
                                           {"id", where},
                                           {"pid", "1"},
                                           {"host", "b"}}));
    store.set("ringreduce/table", encode({{"go", "1"},
                                          {"wire", "tcp"},
                                          {"nonce", "old"},
                                          {"token1", "old"},
                                          {"token2", "old"}}));
    ranks::inThreads(3, [&](int r) {
      if (r == 2) std::this_thread::sleep_for(std::chrono::milliseconds(300));
      CHECK_EQ(met(store, r, 3).host_memory.members.size(), 3u);
    });
  }
  // The same between hosts.
  processes::SharedStore store;
  store.set("ringreduce/rank/1", encode({{"version", kVersion},
                                         {"size", "2"},
                                         {"token", "old"},
                                         {"id", "a"},
                                         {"pid", "1"},
                                         {"host", "b"}}));
  const auto ends = processes::run(2, [&](int r) {
    const ranks::Setting host("RINGREDUCE_HOSTID", r == 0 ? "a" : "b");
    if (r == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    CHECK_EQ(met(store, r, 2).hosts->count(), 2);
  });
  for (const std::string& end : ends) CHECK_EQ(end, "");
}

TEST(a_rank_of_another_job_is_refused_and_the_right_one_is_not_disturbed) {
  const auto meetAs = [](Store& store, int rank, const char* job) {
    GroupOptions options = patience(20 * kSecond);
    options.launcher = "Slurm";
    options.job = job;
    return rendezvous(store, rank, 2, options, [](const Hosts&) { return ""; });
  };
  for (const char* wire : {"auto", "tcp"}) {
    const ranks::Setting setting("RINGREDUCE_WIRE", wire);
    ranks::MemoryStore store;
    // A job that has ended long ago left this.
    store.set("ringreduce/table", encode({{"wire", "memory"},
                                          {"version", kVersion},
                                          {"id", hostId()},
                                          {"socket", "ringreduce-none"},
                                          {"nonce", "old"},
                                          {"launcher", "Slurm"},
                                          {"job", "1.0"}}));
    std::atomic<bool> is_refused = false;
    ranks::inThreads(3, [&](int r) {
      if (r == 0) std::this_thread::sleep_for(std::chrono::milliseconds(300));
      while (r == 2 && !is_refused) std::this_thread::yield();
      if (r == 1) {
        const auto text = [&] { meetAs(store, 1, "7.1"); };
        CHECK(failureOf(text, "of Slurm job 7.1 came to the store of rank 0 (pid ") ==
              Failure::kSetup);
        is_refused = true;
      } else {
        const Rendezvous all = meetAs(store, r / 2, "7.0");
        CHECK_EQ(all.hosts ? all.hosts->size() : static_cast<int>(all.host_memory.members.size()),
                 2);
      }
    });
  }
}

TEST(a_rank_that_comes_after_rank_0_gave_up_gets_its_reason_at_once) {
  ranks::MemoryStore store;
  ranks::inThreads(2, [&](int r) {
    if (r == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    GroupOptions options = patience(20 * kSecond);
    options.choose_shared = [](int) -> SharedOptions { throw Error(Failure::kSetup, "BAD=1"); };
    const auto text = r == 0 ? "BAD=1" : "BAD=1, learned by rank 1";
    CHECK(failureOf([&] { rendezvous(store, r, 2, options, [](const Hosts&) { return ""; }); },
                    text) == Failure::kSetup);
  });
}

TEST(a_rank_that_cannot_take_part_tells_all_ranks) {
  for (const int culprit : {0, 2}) {
    ranks::MemoryStore store;
    ranks::inThreads(3, [&](int r) {
      if (r == 0) std::this_thread::sleep_for(std::chrono::milliseconds(300));
      GroupOptions options = patience(20 * kSecond);
      if (r == culprit) options.refusal = Error(Failure::kSetup, "BAD=1");
      const std::string text =
          "rank " + std::to_string(culprit) + " (pid " + std::to_string(getpid()) + "): BAD=1";
      CHECK(failureOf([&] { rendezvous(store, r, 3, options, [](const Hosts&) { return ""; }); },
                      text) == Failure::kSetup);
    });
  }
}

TEST(the_ranks_of_a_large_group_meet) {
  ranks::MemoryStore store;
  GroupOptions options = patience(2 * kSecond);
  for (int r = 0; r < 5000; ++r) options.global_ranks.push_back(100'000 + 2 * r);
  ranks::inThreads(3, [&](int r) {  // the others never come
    CHECK(failureOf([&] { rendezvous(store, r, 5000, options, [](const Hosts&) { return ""; }); },
                    "ranks 100006, 100008, 100010,") == Failure::kTimeout);
  });
}

TEST(a_rank_of_another_large_group_of_the_same_name_is_refused) {
  ranks::MemoryStore store;
  ranks::inThreads(2, [&](int r) {
    GroupOptions options = patience(r == 0 ? 3 * kSecond : 20 * kSecond);
    for (int i = 0; i < 64; ++i) options.global_ranks.push_back(i);
    if (r == 1) options.global_ranks.back() = 99;  // not one of those that are shown
    const auto kind = r == 0 ? Failure::kTimeout : Failure::kSetup;
    CHECK(failureOf([&] { rendezvous(store, r, 64, options, [](const Hosts&) { return ""; }); },
                    "of ranks 0, 1, 2, 3, 4, 5, 6, 7 and 56 others (hash ") == kind);
  });
}

TEST(a_rank_that_does_not_see_its_rank_0_gets_no_reason_of_another_group) {
  ranks::MemoryStore store;
  const auto meets = [&](int r, std::vector<int> ranks, const std::string& text) {
    GroupOptions options = patience(kSecond);
    options.global_ranks = std::move(ranks);
    CHECK(failureOf([&] { rendezvous(store, r, 2, options, [](const Hosts&) { return ""; }); },
                    text) == Failure::kTimeout);
  };
  meets(0, {0, 1}, "rank 1 of 2 did not join");
  meets(1, {2, 3}, "rank 2 of 2 did not join");
}

TEST(a_rank_that_gives_up_raises_the_reason_that_another_one_stored_first) {
  processes::SharedStore store;
  ranks::inThreads(2, [&](int r) {
    if (r == 1) {
      CHECK(failureOf([&] { met(store, 1, 2, 100 * kMillisecond); },
                      "rank 2's wire is cut, learned by rank 1") == Failure::kPeerLost);
      return;
    }
    // As a rank 0 that is stopped after all ranks have confirmed its table.
    const auto await = [&](const char* field) {
      for (;; std::this_thread::sleep_for(std::chrono::milliseconds(1)))
        if (const Fields record = decode(store.get("ringreduce/rank/1").value_or(""));
            record.contains(field))
          return record;
    };
    Fields table{{"attempt", "1"},  {"version", kVersion}, {"id", "a"},
                 {"wire", "tcp"},   {"secret", "s"},       {"options", SharedOptions().toText()},
                 {"nonce", "first"}};
    store.set("ringreduce/table", encode(table));
    Fields record = await("token");
    for (const char* field : {"token", "id", "pid", "pid_namespace", "host"})
      for (const char* rank : {"1", "0"}) {
        table[std::string(field) + rank] = fieldOf(record, field);
        if (field == std::string("token")) record[field] = "of rank 0";
      }
    table["nonce"] = "second";
    store.set("ringreduce/table", encode(table));
    await("seen");
    store.set(reasonKey("second"), encode({Failure::kPeerLost, "rank 2's wire is cut"}, 2));
  });
  CHECK_EQ(fieldOf(decode(*store.get(reasonKey("second"))), "text"), "rank 2's wire is cut");
}

TEST(each_of_two_reasons_is_the_first_one) {
  processes::SharedStore able;
  ranks::MemoryStore unable;  // has no compare_set
  for (Store* store : {static_cast<Store*>(&able), static_cast<Store*>(&unable)}) {
    CHECK_EQ(storeReason(*store, "key", "first"), "first");
    CHECK_EQ(storeReason(*store, "key", "second"), "first");
    CHECK_EQ(*store->get("key"), "first");
  }
}

TEST(machines_with_the_same_id_are_told) {
  ranks::MemoryStore store;
  bool may = false;
  std::thread([&] { may = unshare(CLONE_NEWNET) == 0; }).join();  // needs root
  if (!may) return;
  ranks::inThreads(2, [&](int r) {
    if (r == 1) unshare(CLONE_NEWNET);  // a machine with the id of this one
    CHECK(failureOf([&] { met(store, r, 2, 2 * kSecond); },
                    "although both have the host id '" + hostId()) == Failure::kTimeout);
  });
}

TEST(a_rank_that_does_not_come_is_named_by_all) {
  ranks::MemoryStore store;
  ranks::inThreads(4, [&](int r) {
    if (r == 1 || r == 3) return;
    CHECK(failureOf([&] { met(store, r, 4, 1500 * kMillisecond); },
                    "ranks 1 and 3 of 4 did not join within 1.5 s, making group 'test'") ==
          Failure::kTimeout);
  });
  // No rank tells the others if rank 0 is missing.
  CHECK(failureOf([&] { met(store, 2, 3, 100 * kMillisecond); }, "rank 0 of 3 did not join") ==
        Failure::kTimeout);
}

TEST(two_processes_of_one_number_end_it_for_all) {
  for (int claimed : {0, 1}) {
    ranks::MemoryStore store;
    const Nanos begin = now();
    ranks::inThreads(claimed + 2, [&](int t) {  // the missing ranks are not waited for
      const int rank = std::min(t, claimed);
      CHECK(failureOf([&] { met(store, rank, 4, 60 * kSecond); },
                      "two processes claim rank " + std::to_string(claimed)) == Failure::kSetup);
    });
    CHECK(now() - begin < 30 * kSecond);
    // Its remains do not disturb the next rendezvous.
    ranks::inThreads(3, [&](int r) { CHECK_EQ(met(store, r, 3).host_memory.members.size(), 3u); });
  }
}

TEST(another_world_size_ends_it_for_all_at_once) {
  ranks::MemoryStore store;
  const Nanos begin = now();
  ranks::inThreads(3, [&](int r) {
    CHECK(failureOf([&] { met(store, r, r == 2 ? 4 : 3, 60 * kSecond); },
                    "was started with world size 4, rank 0 with 3") == Failure::kSetup);
  });
  CHECK(now() - begin < 30 * kSecond);
}
