// Groups whose ranks are threads: every collective and algorithm, the four errors, life and death.
//
// Under ThreadSanitizer this shows that slots, flags, verdicts and threads are ordered as they must
// be; what needs processes (a killed rank, a fork) is tested from Python.
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "algorithm/cut.h"
#include "base/executor.h"
#include "base/stream_copy.h"
#include "check.h"
#include "ranks.h"
#include "transport/shm/shared_block.h"

using namespace ringreduce;
using ranks::failureOf;
using ranks::Setting;

namespace {

// Values whose sum depends on the order of addition.
float value(int rank, size_t i) {
  return static_cast<float>((i * 2654435761u + static_cast<size_t>(rank) * 40503u) % 1000003) *
             1.37f -
         500000.f * static_cast<float>(rank % 2);
}

std::vector<float> input(int rank, size_t n) {
  std::vector<float> data(n);
  for (size_t i = 0; i < n; ++i) data[i] = value(rank, i);
  return data;
}

std::vector<float> canonicalSum(int P, size_t n) {
  const Cut cut{n, P};
  std::vector<float> sum(n);
  for (size_t i = 0; i < n; ++i) {
    const int c = cut.chunkOf(i);
    sum[i] = value(kthToAdd(c, 0, P), i);
    for (int k = 1; k < P; ++k) sum[i] += value(kthToAdd(c, k, P), i);
  }
  return sum;
}

void allReduceMatches(int P) {
  for (size_t n : {0, 1, P - 1, P, P + 1, 127, 128, 129, 1021, 4096, 5003, 70001}) {
    const std::vector<float> expected = canonicalSum(P, n);
    ranks::inGroup(P, [&](Group& group) {
      for (int again = 0; again < 3; ++again) {
        std::vector<float> data = input(group.rank(), n);
        group.run({AllReduce{data.data(), n, DType::kFloat32, ReduceOp::kSum}});
        CHECK(data == expected);
      }
    });
  }
}

}  // namespace

TEST(every_algorithm_gives_the_canonical_bits) {
  const Setting small("RINGREDUCE_SLOT_BYTES", "4096");
  for (const char* algorithm : {"direct", "twoshot", "ring"}) {
    const Setting chosen("RINGREDUCE_ALGORITHM", algorithm);
    for (int P : {1, 2, 3, 4, 7}) allReduceMatches(P);
  }
}

TEST(fewest_slots) {
  const Setting small("RINGREDUCE_SLOT_BYTES", "4096"), few("RINGREDUCE_SLOTS", "3");
  for (const char* algorithm : {"direct", "twoshot", "ring"}) {
    const Setting chosen("RINGREDUCE_ALGORITHM", algorithm);
    allReduceMatches(3);
  }
}

// Some ranks may have their data in blocks, and others not.
TEST(shared_tensors_give_the_canonical_bits) {
  for (int P : {2, 3, 4})
    for (size_t n : {16384, 20000, 70001, 300007}) {
      const std::vector<float> expected = canonicalSum(P, n);
      ranks::inGroup(P, [&](Group& group) {
        const int me = group.rank();
        std::vector<float> own(n);
        std::shared_ptr<SharedBlock> block;
        for (int again = 0; again < 12; ++again) {
          // In turns: all share, all but one, none; new blocks now and then, at any offset.
          const bool shares = again % 4 < 2 || (again % 4 == 2 && me != again % P);
          const size_t offset = static_cast<size_t>(again % 3) * 12;
          if (again % 6 == 0) block = SharedBlock::create(n * sizeof(float) + 64);
          float* data = shares ? reinterpret_cast<float*>(block->data() + offset) : own.data();
          std::ranges::copy(input(me, n), data);
          group.run({AllReduce{data, n, DType::kFloat32, ReduceOp::kSum}});
          CHECK(std::equal(expected.begin(), expected.end(), data));
        }
      });
    }
}

// Each collective that has a way in place gives what it gives on other memory, and leaves its
// inputs.  The largest messages are written past the caches, and gathered into their outputs.
TEST(every_collective_in_shared_tensors) {
  constexpr DType kType = DType::kFloat32;
  constexpr size_t kLarge = kStreamedBytes / sizeof(float) / 3 + 5;
  for (const int P : {2, 3, 5})
    for (const size_t n : {size_t{16384}, size_t{30011}, kLarge}) {
      if (n == kLarge && P != 3) continue;
      const auto index = [](int r) { return static_cast<size_t>(r); };
      const size_t whole = index(P) * n;
      ranks::inGroup(P, [&](Group& group) {
        const int me = group.rank();
        const auto block = SharedBlock::create(2 * whole * sizeof(float));
        std::vector<float> plain(2 * whole), apart;
        // A call reads the first `whole` floats of its memory and writes the others, or in place.
        const auto inputs = [&](float* memory) {
          std::vector<const void*> parts;
          for (int r = 0; r < P; ++r) parts.push_back(memory + index(r) * n);
          return parts;
        };
        const auto outputs = [&](float* memory) {
          std::vector<void*> parts;
          for (int r = 0; r < P; ++r) parts.push_back(memory + whole + index(r) * n);
          return parts;
        };
        const std::vector<size_t> counts(index(P), n);
        std::vector<size_t> uneven = counts;
        uneven[1] = n - 3;
        const auto uneven_outputs = [&](float* memory) {
          std::vector<void*> parts = outputs(memory);
          for (int r = 2; r < P; ++r) parts[index(r)] = memory + whole + index(r) * n - 3;
          return parts;
        };
        const std::vector<float> before[] = {input(me, whole), input(me + P, whole)};
        const std::vector<std::function<CollectiveCall(float*)>> calls{
            [&](float* m) { return Broadcast{m, whole, kType, P - 1}; },
            [&](float* m) { return Reduce{m, m, whole, kType, ReduceOp::kSum, 1}; },
            [&](float* m) { return Reduce{m, m + whole, whole, kType, ReduceOp::kAvg, 1}; },
            [&](float* m) { return AllGather{m, outputs(m), counts, kType}; },
            [&](float* m) {  // its input lies in its output
              return AllGather{m + whole + index(me) * n, outputs(m), counts, kType};
            },
            [&](float* m) {  // its input is in no block
              return AllGather{before[0].data(), outputs(m), counts, kType};
            },
            [&](float* m) { return AllGather{m, uneven_outputs(m), uneven, kType}; },
            [&](float* m) {  // one rank's output is in no block, and its input is
              std::vector<void*> places = outputs(m);
              if (me == 1) {
                apart.assign(whole, 0);
                for (int r = 0; r < P; ++r) places[index(r)] = apart.data() + index(r) * n;
              }
              return AllGather{m, places, counts, kType};
            },
            [&](float* m) {
              return ReduceScatter{inputs(m), counts, m + whole, kType, ReduceOp::kAvg};
            },
            [&](float* m) {  // its output lies in its input
              return ReduceScatter{inputs(m), counts, m + index(me) * n, kType, ReduceOp::kSum};
            },
            [&](float* m) { return AllToAll{inputs(m), outputs(m), counts, counts, true, kType}; },
        };
        for (size_t k = 0; k < 3 * calls.size(); ++k) {
          const bool shares = k < 2 * calls.size() || me > 0;  // at last one rank has none
          std::vector<float> own;
          if (!shares) own.resize(2 * whole);
          float* const memory = shares ? reinterpret_cast<float*>(block->data()) : own.data();
          for (float* m : {plain.data(), memory}) {
            std::ranges::copy(before[0], m);
            std::ranges::copy(before[1], m + whole);
            group.run({calls[k % calls.size()](m)});
            std::ranges::copy(apart, m + whole);
            apart.clear();
          }
          CHECK(std::equal(plain.begin(), plain.end(), memory));
        }
      });
    }
}

TEST(blocks_are_found_by_address) {
  auto block = SharedBlock::create(100000);
  const std::byte* data = block->data();
  CHECK(SharedBlock::holding(data, block->size()) == block);
  CHECK(SharedBlock::holding(data + 99999, 1) == block);
  CHECK(!SharedBlock::holding(data, block->size() + 1));
  CHECK(!SharedBlock::holding(data - 1, 1));
  block.reset();
  CHECK(!SharedBlock::holding(data, 1));
}

// What a peer writes later does not arrive, and a peer that reads late does not see what the caller
// writes then: also where peers only read.
TEST(a_failed_operation_leaves_a_private_copy) {
  for (const bool only_read : {false, true}) {
    std::atomic<bool> has_failed{false};
    ranks::inGroup(2, [&](Group& group) {
      const auto block = SharedBlock::create(1 << 20);
      auto* data = reinterpret_cast<float*>(block->data());
      const size_t n = block->size() / sizeof(float);
      std::vector<float> gathered(2 * n);
      group.run({AllReduce{data, n, DType::kFloat32, ReduceOp::kSum}});  // maps it
      std::fill(data, data + n, 7.f);
      // As a peer would, which has a mapping of its own.
      void* mapped =
          mmap(nullptr, block->size(), PROT_READ | PROT_WRITE, MAP_SHARED, block->fd(), 0);
      CHECK(mapped != MAP_FAILED);
      if (group.rank() == 0) {  // the other does not come
        Operation operation{AllReduce{data, n, DType::kFloat32, ReduceOp::kSum}};
        if (only_read)
          operation.call =
              AllGather{data, {gathered.data(), gathered.data() + n}, {n, n}, DType::kFloat32};
        operation.timeout = 50 * kMillisecond;
        std::string why;
        CHECK(failureOf([&] { group.run(operation); }, why) == Failure::kTimeout);
        has_failed = true;
        CHECK(!SharedBlock::holding(data, 1));
        auto* peers = static_cast<float*>(mapped);
        std::fill(data, data + n, 8.f);
        CHECK(std::count(peers, peers + n, 7.f) == static_cast<long>(n));
        std::fill(peers, peers + n, 9.f);
        CHECK(std::count(data, data + n, 8.f) == static_cast<long>(n));
      }
      while (!has_failed) std::this_thread::yield();
      munmap(mapped, block->size());
    });
  }
}

TEST(a_completion_in_a_waiting_thread_may_wait_for_a_later_operation) {
  for (const bool quick : {true, false}) {
    Executor executor;
    std::shared_ptr<OperationHandle> later;
    std::atomic<bool> may_end{false};
    const auto first = executor.submit(
        [&](bool) {
          while (!may_end) std::this_thread::yield();
        },
        [&](std::exception_ptr) { later->wait(kNever, nullptr); }, quick);
    later = executor.submit([](bool) {}, nullptr, quick);
    std::thread waiter([&] { executor.runUntil(*first); });
    // By then the worker sleeps until the first operation ends.
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    may_end = true;
    waiter.join();
    executor.drain(nullptr);
    CHECK(later->isDone());
  }
}

TEST(a_completion_may_wait_for_a_later_one_where_no_thread_can_be_started) {
  for (const bool stops : {false, true}) {
    Executor executor;
    executor.submit([](bool) {}, [](std::exception_ptr) {}, false);  // starts the first threads
    executor.drain(nullptr);
    // No machine has room for such a stack.
    pthread_attr_t usual, huge;
    CHECK(pthread_getattr_default_np(&usual) == 0 && pthread_attr_init(&huge) == 0);
    CHECK(pthread_attr_setstacksize(&huge, size_t{1} << 48) == 0);
    CHECK(pthread_setattr_default_np(&huge) == 0);
    const auto later = std::make_shared<std::promise<void>>();  // stopped threads end later
    std::atomic<int> in_time{-1};
    executor.submit([](bool) {},
                    [&, later](std::exception_ptr) {
                      in_time = later->get_future().wait_for(std::chrono::seconds(10)) ==
                                std::future_status::ready;
                    },
                    false);
    executor.submit([](bool) {},
                    [&, later](std::exception_ptr) {
                      if (stops) executor.stop();  // in a thread of its own
                      later->set_value();
                    },
                    false);
    while (in_time < 0) std::this_thread::yield();
    CHECK(pthread_setattr_default_np(&usual) == 0);
    CHECK_EQ(in_time.load(), 1);
  }
}

TEST(an_executor_stops_while_a_thread_that_waits_runs_its_operations) {
  Executor executor;
  std::atomic<bool> may_end{false};
  executor.submit(
      [&](bool) {
        while (!may_end) std::this_thread::yield();
      },
      nullptr, true);
  const auto last = executor.submit([](bool) {}, nullptr, true);
  std::thread waiter([&] { executor.runUntil(*last); });
  std::thread stopper([&] { executor.stop(); });
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  may_end = true;
  waiter.join();
  stopper.join();
  CHECK(last->isDone());
}

TEST(queued_and_blocking_operations_keep_their_order) {
  ranks::inGroup(3, [](Group& group) {
    std::vector<std::vector<float>> data(40, std::vector<float>(500, 1.f));
    std::vector<std::shared_ptr<OperationHandle>> tickets;
    std::atomic<int> told{0};
    for (size_t i = 0; i < data.size(); ++i) {
      const Operation operation{AllReduce{data[i].data(), 500, DType::kFloat32, ReduceOp::kSum}};
      if (i % 3 == 2)
        group.run(operation);
      else
        tickets.push_back(group.submit(operation, [&](std::exception_ptr e) { told += !e; }));
    }
    for (const auto& ticket : tickets) CHECK(ticket->wait(kNever, nullptr));
    for (const auto& part : data) CHECK(part == std::vector<float>(500, 3.f));
    group.shutdown();
    CHECK_EQ(told.load(), static_cast<int>(tickets.size()));
  });
}

TEST(a_completion_may_run_operations_and_drop_the_group) {
  ranks::MemoryStore store;
  ranks::inThreads(2, [&](int r) {
    auto group = Group::create(store, r, 2, {.name = "test"});
    float one = 1, two = 1;
    std::atomic<bool> done{false};
    Group* raw = group.get();
    raw->submit({AllReduce{&one, 1, DType::kFloat32, ReduceOp::kSum}},
                [&, held = std::move(group)](std::exception_ptr) mutable {
                  held->run({AllReduce{&two, 1, DType::kFloat32, ReduceOp::kSum}});
                  held.reset();
                  done = true;
                });
    while (!done) std::this_thread::yield();
    CHECK_EQ(one, 2.f);
    CHECK_EQ(two, 2.f);
  });
}

TEST(two_groups_from_two_threads) {
  ranks::MemoryStore stores[2];
  ranks::inThreads(4, [&](int t) {
    const int which = t / 2, rank = t % 2;
    const auto group = Group::create(stores[which], rank, 2, {.name = "test"});
    for (int i = 0; i < 200; ++i) {
      float x = static_cast<float>(i + which);
      group->run({AllReduce{&x, 1, DType::kFloat32, ReduceOp::kSum}});
      CHECK_EQ(x, 2 * static_cast<float>(i + which));
    }
  });
}

TEST(a_group_can_be_made_again_on_the_same_store) {
  ranks::MemoryStore store;
  ranks::inThreads(3, [&](int r) {
    for (int i = 0; i < 5; ++i) {
      const auto group = Group::create(store, r, 3, {.name = "test"});
      group->run({Barrier{}});
    }
  });
  CHECK_EQ(store.full(), 0u);
  // Ranks that share no memory empty their records (bootstrap/rendezvous.h).
  if (!ranks::overSockets()) CHECK_EQ(store.size(), 0u);
}

TEST(a_slower_rank_finishes_what_was_posted) {
  ranks::inGroup(2, [](Group& group) {
    float x = static_cast<float>(group.rank() + 1);
    if (group.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    group.run({Broadcast{&x, 1, DType::kFloat32, 0}});  // rank 0 leaves at once
    CHECK_EQ(x, 1.f);
  });
}

TEST(a_difference_that_nobody_waited_for_shows_at_the_next_operation) {
  ranks::inGroup(3, [](Group& group) {
    float x = 0;
    // Ranks 0 and 2 are both a root, which waits for nobody.
    group.run({Broadcast{&x, 1, DType::kFloat32, 0}});
    const Operation second{Broadcast{&x, 1, DType::kFloat32, group.rank() == 2 ? 2 : 0}};
    const auto twice = [&] {
      group.run(second);
      group.run({Barrier{}});
    };
    CHECK(failureOf(twice, "rank 2 called broadcast #1") == Failure::kMismatch);
  });
}

TEST(ranks_that_choose_other_algorithms_by_mistake_still_disagree_openly) {
  ranks::inGroup(3, [](Group& group) {
    std::vector<float> data(1 << 16);
    const size_t n = group.rank() == 2 ? 16 : data.size();  // direct there, two-shot elsewhere
    const Operation mine{AllReduce{data.data(), n, DType::kFloat32, ReduceOp::kSum}};
    CHECK(failureOf([&] { group.run(mine); }, "rank 2 called") == Failure::kMismatch);
  });
}

TEST(abort_ends_a_wait_everywhere) {
  ranks::inGroup(3, [](Group& group) {
    if (group.rank() == 2) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      group.abort("had enough");
    }
    CHECK(failureOf([&] { group.run({Barrier{}}); }, "had enough") == Failure::kAborted);
  });
}

TEST(the_reason_reaches_every_rank_and_those_who_come_later) {
  for (int round = 0; round < 4; ++round) {
    ranks::MemoryStore store;
    ranks::inThreads(4, [&](int r) {
      CHECK(failureOf([&] { Group::create(store, r, r == 2 ? 5 : 4, {.name = "test"}); },
                      "world size mismatch: rank 2") == Failure::kSetup);
    });
    if (round > 0) continue;
    // A rank that was not there waits a little, in case a new attempt begins, and then knows.
    CHECK(failureOf([&] { Group::create(store, 5, 6, {.name = "test"}); },
                    "world size mismatch: rank 2") == Failure::kSetup);
    // Those that were there try again, and are not taken in by the old entry.
    ranks::inThreads(4, [&](int r) {
      if (r == 0) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      Group::create(store, r, 4, {.name = "test"})->run({Barrier{}});
    });
  }
}

TEST(options_that_cannot_be_fail_on_all_ranks) {
  ranks::MemoryStore store;
  GroupOptions bad{.name = "test"};
  bad.shared = SharedOptions{.slot_bytes = 100};
  ranks::inThreads(2, [&](int r) {
    CHECK(failureOf([&] { Group::create(store, r, 2, bad); }, "slot_bytes") == Failure::kArgument);
  });
}
