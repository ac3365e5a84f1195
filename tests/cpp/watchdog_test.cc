// The watchdog of GPU operations without a GPU: deadlines, ranks that die, stop, disagree or give
// up, told by real groups of threads and of processes.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <thread>

#include "check.h"
#include "cuda/communicator/host_ranks.h"
#include "group/agreement.h"
#include "processes.h"
#include "ranks.h"
#include "thread_gpu.h"

using namespace ringreduce;
using namespace ringreduce::cuda;
using thread_gpu::Rank;

namespace {

GroupOptions named() {
  GroupOptions options;
  options.name = "test";
  options.stall = 3600 * kSecond;
  return options;
}

std::vector<float> filled(size_t n, int rank, int call) {
  std::vector<float> data(n);
  for (size_t i = 0; i < n; ++i)
    data[i] = static_cast<float>((i * 7 + static_cast<size_t>(rank * 13 + call)) % 1000);
  return data;
}
bool isSum(const std::vector<float>& data, int size, int call) {
  for (size_t i = 0; i < data.size(); ++i) {
    float sum = 0;
    for (int r = 0; r < size; ++r)
      sum += static_cast<float>((i * 7 + static_cast<size_t>(r * 13 + call)) % 1000);
    if (data[i] != sum) return false;
  }
  return true;
}
bool isPoisoned(const std::vector<float>& data) {
  for (float x : data)
    if (x == x) return false;
  return true;
}

constexpr Nanos kLong = 60 * kSecond;

std::string bucket() {
  return "DDP bucket 2";
}

}  // namespace

TEST(all_ranks_get_the_sums) {
  for (int size : {2, 3, 5})
    ranks::inGroup(
        size,
        [](Group& group) {
          std::vector<std::vector<float>> data;
          for (int call = 0; call < 60; ++call)
            data.push_back(
                filled(call % 3 == 0 ? 3 : 700 + static_cast<size_t>(call), group.rank(), call));
          Rank rank(group);  // its stream ends before the data does
          for (int call = 0; call < 60; ++call) {
            auto& mine = data[static_cast<size_t>(call)];
            rank.allReduce(mine.data(), mine.size(), kLong);
          }
          CHECK(rank.watchdog().wait(kLong));
          for (int call = 0; call < 60; ++call)
            CHECK(isSum(data[static_cast<size_t>(call)], group.size(), call));
          CHECK(rank.watchdog().settle(kLong));
        },
        named());
}

// While nobody waits on the host, the ends of short operations are collected some at a time.
TEST(operations_that_nobody_waits_for_are_asked_for_seldom) {
  constexpr int kOperations = 500;
  constexpr Nanos kEach = 400 * kMicrosecond;
  ranks::inGroup(
      2,
      [](Group& group) {
        Rank rank(group);
        std::atomic<int> refused = 0;
        const Nanos start = now();
        for (int i = 1; i <= kOperations; ++i) {
          rank.watchdog().announce({.count = 1});
          rank.watchdog().track(kLong, [&refused, end = start + i * kEach] {
            if (now() >= end) return true;
            ++refused;
            return false;
          });
        }
        std::this_thread::sleep_for(std::chrono::nanoseconds(start + kOperations * kEach - now()));
        // A pause of 2 ms after each, and shorter ones at first.
        CHECK(refused <= (now() - start) / (2 * kMillisecond) + 10);
        CHECK(rank.watchdog().wait(kLong));
        CHECK(rank.watchdog().settle(kLong));
      },
      named());
}

namespace {

// The records once all are over, which waits for what the other ranks tell.
std::vector<OpRecord> recordsOf(Watchdog& watchdog) {
  for (;; std::this_thread::yield()) {
    std::vector<OpRecord> records = watchdog.records(0);
    if (std::ranges::all_of(records, [](const OpRecord& one) { return one.done != 0; }))
      return records;
  }
}

}  // namespace

// As of operations on CPU tensors; one that nothing tells the begin of has some time of its wait.
TEST(operations_leave_records) {
  ranks::inGroup(
      2,
      [](Group& group) {
        Rank rank(group);
        Watchdog& watchdog = rank.watchdog();
        CHECK(!watchdog.isFollowed());
        std::atomic<bool> begins = false, ends = false;
        watchdog.announce({.count = 10,
                           .kind = Kind::kAllReduce,
                           .dtype = DType::kFloat32,
                           .op = static_cast<uint8_t>(ReduceOp::kSum)});
        const Nanos called = monotonicNow();
        watchdog.track(kLong, [&] { return ends.load(); }, {}, [&] { return begins.load(); });
        watchdog.announce({.count = 3, .kind = Kind::kAllGather, .dtype = DType::kInt64});
        watchdog.track(kLong, [] { return true; });

        std::vector<OpRecord> records = watchdog.records(0);
        CHECK(watchdog.isFollowed());
        CHECK(records.size() == 2);
        CHECK(records[0].state == OpRecord::State::kQueued && records[0].arrived == 0);
        CHECK(records[1].state == OpRecord::State::kQueued && records[1].index == 1);

        const Nanos before = monotonicNow();
        begins = true;
        while (watchdog.records(0)[0].state != OpRecord::State::kRuns) std::this_thread::yield();
        ends = true;
        CHECK(watchdog.wait(kLong));

        records = recordsOf(watchdog);
        CHECK(records.size() == 2 && watchdog.records(1).size() == 1);
        const OpRecord& first = records[0];
        CHECK(first.state == OpRecord::State::kDone && first.sequence == 0 && first.bytes == 40);
        CHECK(first.kind == Kind::kAllReduce && first.dtype == DType::kFloat32);
        CHECK(first.op == static_cast<uint8_t>(ReduceOp::kSum) && first.root == kNoRoot);
        CHECK(first.posted <= monotonicNow() && first.posted >= called - kSecond);
        CHECK(first.arrived >= before && first.arrived - first.clock_error <= first.done);
        CHECK(first.clock_error >= 0 && first.done >= first.arrived);
        const OpRecord& second = records[1];
        CHECK(second.state == OpRecord::State::kDone && second.sequence == 1);
        CHECK(second.kind == Kind::kAllGather && second.bytes == 2 * 3 * sizeof(int64_t));
        CHECK(second.arrived == first.done && second.clock_error == second.done - second.arrived);
        CHECK(watchdog.settle(kLong));
      },
      named());
}

// Streams come to an operation at their own times, which are those that count.
TEST(records_name_the_rank_whose_stream_came_last) {
  ranks::inGroup(
      3,
      [](Group& group) {
        Rank rank(group);
        Watchdog& watchdog = rank.watchdog();
        const auto put = [&](Watchdog::Reached begun, const std::atomic<bool>& ends) {
          watchdog.announce({.count = 10, .kind = Kind::kAllReduce});
          watchdog.track(kLong, [&ends] { return ends.load(); }, {}, std::move(begun));
        };
        std::atomic<bool> begins = group.rank() != 1, ends = false;
        put([&] { return begins.load(); }, ends);
        // Nothing tells when rank 2 comes to the second one.
        put(group.rank() == 2 ? Watchdog::Reached() : [] { return true; }, ends);
        const auto await = [&](OpRecord::State state) {
          while (watchdog.records(0)[0].state != state) std::this_thread::yield();
        };
        await(begins ? OpRecord::State::kRuns : OpRecord::State::kQueued);
        group.run({Barrier{}});
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        begins = true;
        await(OpRecord::State::kRuns);
        group.run({Barrier{}});
        ends = true;
        CHECK(watchdog.wait(kLong));
        const std::vector<OpRecord> records = recordsOf(watchdog);
        CHECK_EQ(records.size(), size_t{2});
        const OpRecord& first = records[0];
        CHECK_EQ(first.known, 3u);
        CHECK_EQ(first.latest[0].rank, 1);
        CHECK(first.latest[0].nanos >= 20e6F);
        CHECK(first.first <= first.median && first.first_data > first.first);
        CHECK_EQ(records[1].known, group.rank() == 2 ? 1u : 2u);
        Totals totals;
        watchdog.addTo(totals);
        const Totals::OfKind& sums = totals.kinds[static_cast<size_t>(Kind::kAllReduce)];
        CHECK_EQ(sums.operations, uint64_t{2});
        CHECK_EQ(sums.bytes, first.bytes + records[1].bytes);
        Nanos waited = 0;
        for (const OpRecord& record : records) {  // rank 1 may come last to the second one, too
          const auto [last, nanos] = std::pair(record.latest[0].rank, record.latest[0].nanos);
          const Nanos came = std::min(record.median + static_cast<Nanos>(nanos), record.done);
          if (last == 1) waited += std::max<Nanos>(0, came - record.clock_error - record.arrived);
        }
        if (group.rank() != 1) CHECK_EQ(totals.waited[1], waited);
        CHECK(watchdog.settle(kLong));
      },
      named());
}

// Settling is what makes it safe to free memory that peers write to.
TEST(settling_waits_for_the_slowest_rank) {
  std::atomic<bool> slow_is_done = false;
  ranks::inGroup(
      3,
      [&](Group& group) {
        auto data = filled(100, group.rank(), 0);
        Rank rank(group);
        rank.allReduce(data.data(), data.size(), kLong);
        if (group.rank() == 2) {
          // Its stream has something to do after the schedule, but before the host knows it is
          // done.
          const uint64_t ticket = rank.stream().put([&] {
            std::this_thread::sleep_for(std::chrono::milliseconds(200));
            slow_is_done = true;
          });
          rank.watchdog().announce({.count = 1});
          rank.watchdog().track(kLong, [&, ticket] { return rank.stream().isDone(ticket); });
        } else {
          rank.watchdog().announce({.count = 1});
          rank.watchdog().track(kLong, [] { return true; });
        }
        CHECK(rank.watchdog().settle(kLong));
        CHECK(slow_is_done);
      },
      named());
}

// Rank 1 ends the group at about the time at which rank 0's last operation ends.
TEST(settling_ends_when_the_group_fails_at_the_end_of_an_operation) {
  for (int round = 0; round < 200; ++round) {
    std::atomic<bool> is_tracked = false;
    ranks::inGroup(
        2,
        [&](Group& group) {
          Rank rank(group);
          if (group.rank() == 0) {
            const Nanos end = now() + 3 * kMillisecond;
            rank.watchdog().announce({.count = 1});
            rank.watchdog().track(kLong, [end] { return now() >= end; });
            is_tracked = true;
          } else {
            while (!is_tracked) std::this_thread::yield();
            std::this_thread::sleep_for(std::chrono::microseconds(3000 + 10 * round));
            ranks::failureOf(
                [&] { group.epoch()->arbiter->fail(Failure::kAborted, 1, "rank 1 gave up"); });
          }
          CHECK(rank.watchdog().settle(5 * kSecond));
        },
        named());
  }
}

TEST(a_rank_that_does_not_call_is_named) {
  std::atomic<bool> has_called = false;
  ranks::inGroup(
      3,
      [&](Group& group) {
        auto data = filled(2000, group.rank(), 0);
        Rank rank(group);
        if (group.rank() == 1) {
          while (!group.failed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
          return;
        }
        // If rank 2 had not called, rank 0 would name it too.
        if (group.rank() == 0) ranks::await("rank 2 has called", [&] { return has_called.load(); });
        const Nanos timeout = group.rank() == 0 ? 300 * kMillisecond : kLong;
        rank.allReduce(data.data(), data.size(), timeout, ReduceOp::kSum, bucket);
        if (group.rank() == 2) has_called = true;
        CHECK(ranks::failureOf([&] { rank.watchdog().wait(kLong); }, "rank 1") ==
              Failure::kTimeout);
        CHECK(ranks::failureOf([&] { rank.watchdog().check(); }, " (DDP bucket 2)") ==
              Failure::kTimeout);
        CHECK(rank.watchdog().settle(kLong));  // though rank 1 never came
        CHECK(isPoisoned(data));
        CHECK(ranks::failureOf([&] { rank.allReduce(data.data(), 1, kLong); }) ==
              Failure::kTimeout);
      },
      named());
}

TEST(ranks_that_disagree_are_told) {
  ranks::inGroup(
      2,
      [](Group& group) {
        auto data = filled(1000, group.rank(), 0);
        Rank rank(group);
        rank.allReduce(data.data(), 10, kLong);
        rank.watchdog().wait(kLong);
        const Failure how = ranks::failureOf(
            [&] {
              rank.allReduce(data.data(), group.rank() == 0 ? 500 : 600, kLong);
              rank.watchdog().wait(kLong);
              // Nobody needs to have waited for the other: then the next call tells.
              for (;;) {
                rank.watchdog().check();
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
              }
            },
            "500 elements");
        CHECK(how == Failure::kMismatch);
      },
      named());
}

// Each rank's announcement stands in the error as that rank made it, with the rank's own label.
TEST(ranks_that_disagree_on_a_root_are_told) {
  ranks::inGroup(
      2,
      [](Group& group) {
        Rank rank(group);
        const auto broadcast = [&](int root) {
          rank.watchdog().announce(
              {.count = 5, .kind = Kind::kBroadcast, .dtype = DType::kComplex64, .root = root});
          const auto failed = [&] { return group.failed(); };
          rank.watchdog().track(kLong, failed, bucket);
        };
        const auto error = [&](const std::string& words) {
          return ranks::failureOf(
              [&] {
                broadcast(group.rank());
                rank.watchdog().wait(kLong);
              },
              words);
        };
        CHECK(error("broadcast #0 (complex64, 5 elements, from rank 1)") == Failure::kMismatch);
        CHECK(ranks::failureOf([&] { rank.watchdog().check(); }, " (DDP bucket 2), rank ") ==
              Failure::kMismatch);
      },
      named());
}

// As far as a host can be that puts work into a stream whose peer has not come yet.
TEST(a_rank_far_ahead_is_told_too) {
  constexpr int kAhead = 2000, kDiffers = 9;
  ranks::inGroup(
      2,
      [](Group& group) {
        std::vector<float> data(100, 1.0f);
        Rank rank(group);
        const auto call = [&](ReduceOp op) { rank.allReduce(data.data(), 100, kLong, op); };
        const Failure how = ranks::failureOf(
            [&] {
              if (group.rank() == 0)
                for (int i = 0; i < kAhead; ++i) call(ReduceOp::kSum);
              group.run({Barrier{}});
              if (group.rank() == 1)
                for (int i = 0; i <= kDiffers; ++i)
                  call(i == kDiffers ? ReduceOp::kMax : ReduceOp::kSum);
              rank.watchdog().wait(kLong);
            },
            "GPU operation #9");
        CHECK(how == Failure::kMismatch);
        CHECK(rank.watchdog().settle(kLong));
      },
      named());
}

TEST(an_abort_ends_all_waits) {
  ranks::inGroup(
      3,
      [](Group& group) {
        auto data = filled(3000, group.rank(), 0);
        Rank rank(group);
        const Failure how = ranks::failureOf(
            [&] {
              if (group.rank() == 0) {
                std::this_thread::sleep_for(std::chrono::milliseconds(50));
                rank.watchdog().abort("enough");
              } else {
                rank.allReduce(data.data(), data.size(), kLong);
              }
              rank.watchdog().wait(kLong);
            },
            "enough");
        CHECK(how == Failure::kAborted);
        CHECK(rank.watchdog().settle(kLong));
      },
      named());
}

// A stream that is let go tells its peers that its part is done: they must know better by then.
TEST(all_ranks_are_told_before_a_stream_goes_on) {
  ranks::inGroup(
      3,
      [](Group& group) {
        Rank rank(group);
        if (group.rank() == 1) {
          rank.watchdog().abort("enough");
          // The others' watchdogs sleep, since nothing is under way: nobody else can have told
          // them.
          for (int r = 0; r < group.size(); ++r)
            for (int copy = 0; copy < AbortFlag::kCopies; ++copy)
              CHECK(rank.state(r).abort.isSet(copy));
          for (StreamWord& line : rank.own().words)
            CHECK_EQ(std::atomic_ref(line.word).load(), kReleased);
        }
        while (!group.failed()) std::this_thread::yield();
        CHECK(ranks::failureOf([&] { rank.watchdog().check(); }, "enough") == Failure::kAborted);
      },
      named());
}

// All have come to the broadcast, and nothing comes from its root.
TEST(a_root_that_sends_nothing_is_named) {
  constexpr int kRoot = 2;
  ranks::inGroup(
      3,
      [](Group& group) {
        Rank rank(group);
        rank.watchdog().announce(
            {.count = 7, .kind = Kind::kBroadcast, .dtype = DType::kInt8, .root = kRoot});
        group.run({Barrier{}});
        if (group.rank() != kRoot) std::atomic_ref(rank.own().busy).store(1);
        const Nanos timeout = group.rank() == kRoot ? kLong : 200 * kMillisecond;
        rank.watchdog().track(timeout, [&] { return group.failed(); }, bucket);
        while (!group.failed()) std::this_thread::yield();
        const char* words = "rank 2 (";
        CHECK(ranks::failureOf([&] { rank.watchdog().wait(kLong); }, words) == Failure::kTimeout);
        CHECK(ranks::failureOf([&] { rank.watchdog().check(); },
                               "broadcast #0 (int8, 7 elements, from rank 2) timed out") ==
              Failure::kTimeout);
      },
      named());
}

// On rank 0 `change` sets a word for which its stream waits.
void rank2IsNamed(const OpSignature& what, const std::function<void(HostState&)>& change) {
  ranks::inGroup(
      3,
      [&](Group& group) {
        Rank rank(group);
        rank.watchdog().announce(what);
        group.run({Barrier{}});
        if (group.rank() == 0) {
          change(rank.own());
          std::atomic_ref(rank.own().busy).store(1);
        }
        const Nanos timeout = group.rank() == 0 ? 200 * kMillisecond : kLong;
        rank.watchdog().track(timeout, [&] { return group.failed(); }, bucket);
        while (!group.failed()) std::this_thread::yield();
        CHECK(ranks::failureOf([&] { rank.watchdog().wait(kLong); }, "rank 2 (") ==
              Failure::kTimeout);
      },
      named());
}

void setWord(HostState& at, Word word, int setter, uint32_t value) {
  std::atomic_ref(at.words[wordIndex(word, /*half=*/1, setter, /*size=*/3)].word).store(value);
}

// A half of the root does not become free.
TEST(a_reader_that_gives_no_credit_is_named) {
  rank2IsNamed({.count = 7, .kind = Kind::kBroadcast, .dtype = DType::kInt8, .root = 0},
               [](HostState& own) { setWord(own, Word::kFree, /*setter=*/2, 0); });
}

// The only leader of an all-reduce waits for what the others stage, and takes no credit.
TEST(a_rank_that_stages_nothing_for_the_leader_is_named) {
  rank2IsNamed({.count = 7, .kind = Kind::kAllReduce, .dtype = DType::kFloat32},
               [](HostState& own) { setWord(own, Word::kReady, /*setter=*/1, 1); });
}

// A replay of a graph is not announced.  Its reader may be behind the root, whose memory must stay.
TEST(it_is_not_settled_before_peers_have_read_this_ranks_memory) {
  ranks::inGroup(3, [](Group& group) {
    Rank rank(group);
    if (group.rank() == 0) {
      setWord(rank.own(), Word::kFree, /*setter=*/2, 0);
      CHECK(!rank.watchdog().settle(20 * kMillisecond));
      setWord(rank.own(), Word::kFree, /*setter=*/2, 1);
    }
    CHECK(rank.watchdog().settle(kLong));
    group.run({Barrier{}});
  });
}

// What a kernel leaves behind when it gives up becomes the group's error.
TEST(what_a_kernel_reports_is_raised) {
  ranks::inGroup(
      2,
      [](Group& group) {
        Rank rank(group);
        std::atomic<bool> over = false;
        const uint64_t number =
            rank.watchdog().announce({.count = 77,
                                      .kind = Kind::kReduceScatter,
                                      .dtype = DType::kFloat16,
                                      .op = static_cast<uint8_t>(ReduceOp::kMax)});
        group.run({Barrier{}});
        rank.watchdog().track(5 * kSecond, [&] { return over.load(); }, bucket);
        if (group.rank() == 0) {
          Trouble& trouble = rank.own().trouble;
          trouble.operation = number;
          trouble.peer = 1;
          trouble.channel = 3;
          trouble.step = 42;
          publishWord(trouble.cause, static_cast<uint64_t>(Cause::kTimeout));
        }
        while (!group.failed()) std::this_thread::yield();
        over = true;
        CHECK(ranks::failureOf([&] { rank.watchdog().wait(kLong); }, "rank 1") ==
              Failure::kTimeout);
        for (const char* words : {"GPU reduce_scatter #0 (float16, 77 elements, MAX) timed out",
                                  "channel 3, step 42) (DDP bucket 2)"})
          CHECK(ranks::failureOf([&] { rank.watchdog().check(); }, words) == Failure::kTimeout);
        // By the watchdog's thread, after the group has failed.
        for (const Nanos end = deadlineIn(kLong);
             !rank.own().abort.isSet(AbortFlag::kCopies - 1) && now() < end;)
          std::this_thread::yield();
        CHECK(rank.own().abort.isSet(AbortFlag::kCopies - 1));
      },
      named());
}

TEST(a_gpu_that_fails_ends_the_group) {
  ranks::inGroup(
      2,
      [](Group& group) {
        Rank rank(group);
        const Failure how = ranks::failureOf(
            [&] {
              rank.watchdog().announce({.count = 1});
              rank.watchdog().track(kLong, [&]() -> bool {
                if (group.rank() == 1) throw Error(Failure::kSetup, "illegal address");
                return group.failed();
              });
              rank.watchdog().wait(kLong);
              rank.watchdog().check();
            },
            "illegal address");
        CHECK(how == Failure::kAborted);
      },
      named());
}

// CUDA may hold up the thread that asks it, while what it waits for is for the watchdog to end.
TEST(a_gpu_that_does_not_answer_keeps_no_wait_from_ending) {
  ranks::inGroup(
      2,
      [](Group& group) {
        Rank rank(group);
        const Failure how = ranks::failureOf(
            [&] {
              if (group.rank() == 0) {
                rank.watchdog().announce({.count = 1});
                rank.watchdog().track(kLong, [&] {
                  while (!rank.own().abort.isSet(0)) std::this_thread::yield();
                  return true;
                });
              } else {
                std::this_thread::sleep_for(std::chrono::milliseconds(50));
                group.abort("enough");
              }
              rank.watchdog().wait(kLong);
              rank.watchdog().check();
            },
            "enough");
        CHECK(how == Failure::kAborted);
      },
      named());
}

TEST(a_killed_process_is_named_and_all_waits_end) {
  processes::inGroup(3,
                     [](Group& group) {
                       Rank rank(group);
                       auto data = filled(4000, group.rank(), 0);
                       const Nanos start = now();
                       bool called = false;
                       // A rank that is slow may hear of the loss in the wait for its last call
                       // but one, or before its last.
                       const auto calls = [&] {
                         for (int call = 0; call < 20; ++call) {
                           rank.allReduce(data.data(), data.size(), kLong);
                           rank.watchdog().wait(kLong);
                         }
                         if (group.rank() == 2) raise(SIGKILL);
                         rank.allReduce(data.data(), data.size(), kLong, ReduceOp::kSum, bucket);
                         called = true;
                         rank.watchdog().wait(kLong);
                       };
                       CHECK(ranks::failureOf(calls, "rank 2") == Failure::kPeerLost);
                       CHECK(ranks::failureOf([&] { rank.watchdog().check(); }, "(DDP bucket 2)") ==
                             Failure::kPeerLost);
                       CHECK(now() - start < 30 * kSecond);
                       CHECK(!called || isPoisoned(data));
                     },
                     named(), {2});
}

TEST(a_process_killed_amid_calls_is_named) {
  processes::inGroup(
      4,
      [](Group& group) {
        auto data = filled(4000, group.rank(), 0);
        Rank rank(group);
        const Failure how = ranks::failureOf(
            [&] {
              for (int call = 0;; ++call) {
                rank.allReduce(data.data(), data.size(), kLong);
                if (call == 500 && group.rank() == 1) raise(SIGKILL);
                if (call % 50 == 0) rank.watchdog().wait(kLong);
              }
            },
            "rank 1");
        CHECK(how == Failure::kPeerLost);
        CHECK(rank.watchdog().settle(kLong));  // rank 1 is gone, and the streams have ended
      },
      named(), {1});
}

// It came to the call and stands still since: whoever waits for a leader that waits for it must not
// blame the leader.
TEST(a_stopped_process_is_named) {
  processes::inGroup(4,
                     [](Group& group) {
                       auto data = filled(4000, group.rank(), 0);
                       Rank rank(group);
                       const std::vector<pid_t> pids = gatherEach(group, getpid());
                       if (group.rank() == 1) {
                         rank.watchdog().announce({.count = data.size(),
                                                   .kind = Kind::kAllReduce,
                                                   .dtype = DType::kFloat32,
                                                   .op = static_cast<uint8_t>(ReduceOp::kSum)});
                         raise(SIGSTOP);
                       }
                       // Rank 0 would name all that had not called.
                       const auto haveCalled = [&] {
                         for (int r = 1; r < 4; ++r)
                           if (rank.state(r).announced.observe() == 0) return false;
                         return true;
                       };
                       if (group.rank() == 0) ranks::await("the others have called", haveCalled);
                       rank.allReduce(data.data(), data.size(),
                                      group.rank() == 0 ? kSecond : kLong);
                       CHECK(ranks::failureOf([&] { rank.watchdog().wait(kLong); }, "rank 1 (") ==
                             Failure::kTimeout);
                       CHECK(ranks::failureOf([&] { rank.watchdog().check(); }, "stood still") ==
                             Failure::kTimeout);
                       if (group.rank() == 0) kill(pids[1], SIGKILL);
                       CHECK(rank.watchdog().settle(kLong));
                       CHECK(isPoisoned(data));
                     },
                     named(), {1});
}
