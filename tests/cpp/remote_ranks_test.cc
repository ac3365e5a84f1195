// The watchdog between hosts, without a GPU: groups over sockets, where an operation is a switch.
#include "cuda/internode/remote_ranks.h"

#include <unistd.h>

#include <atomic>
#include <csignal>

#include "check.h"
#include "group/agreement.h"
#include "processes.h"
#include "ranks.h"

using namespace ringreduce;
using namespace ringreduce::cuda;
using ranks::failureOf;

namespace {

constexpr Nanos kSoon = 100 * kMillisecond;

void sleepFor(Nanos time) {
  std::this_thread::sleep_for(std::chrono::nanoseconds(time));
}

GroupOptions named() {
  return {.name = "test", .timeout = 20 * kSecond, .stall = 3600 * kSecond};
}

struct Rank {
  explicit Rank(Group& of) : group(of), watchdog(of, std::make_unique<RemoteRanks>(of, hooks())) {}

  RemoteRanks::Hooks hooks() {
    return {[this] { return broken ? "NCCL says so" : ""; },
            [this] {
              if (host_failed)
                group.epoch()->arbiter->fail(Failure::kPeerLost, 0, "a neighbour died");
            },
            [this] { poisoned = true; },
            [this](const std::string&) {
              ++ended;
              begun = done = true;
            }};
  }
  void start(uint64_t count, Nanos timeout = 20 * kSecond, bool has_begun = true) {
    watchdog.announce({.count = count,
                       .kind = Kind::kAllReduce,
                       .dtype = DType::kFloat32,
                       .op = static_cast<uint8_t>(ReduceOp::kSum)});
    begun = has_begun;
    watchdog.track(timeout, [this] { return done.load(); }, {}, [this] { return begun.load(); });
  }
  Failure ends(const std::string& words) {
    return failureOf([&] { watchdog.wait(20 * kSecond); }, words);
  }
  // The group's error, as all ranks have it.
  std::string error() {
    try {
      watchdog.wait(20 * kSecond);
    } catch (const Error& error) {
      const std::string text = error.what();
      return text.substr(0, text.find_first_of(",.", text.find("; noticed by")));
    }
    return "";
  }

  Group& group;
  std::function<void()> meet;  // waits for all ranks, once, whatever becomes of the group
  std::atomic<bool> begun{true}, done{false}, broken{false}, host_failed{false}, poisoned{false};
  std::atomic<int> ended{0};
  Watchdog watchdog;  // last: its threads use the rest
};

// Ranks are threads.  Afterwards all have the same error.
void inRanks(int size, const std::function<void(Rank&)>& body,
             const GroupOptions& options = named()) {
  const ranks::Setting wire("RINGREDUCE_WIRE", "tcp");
  ranks::MeetingPoint here(size), met(size), over(size);
  std::vector<std::string> errors(static_cast<size_t>(size));
  ranks::inGroup(
      size,
      [&](Group& group) {
        Rank rank(group);
        rank.meet = [&] { met.wait(); };
        here.wait();
        try {
          body(rank);
          errors[static_cast<size_t>(group.rank())] = rank.error();
        } catch (...) {
          over.wait();
          throw;
        }
        over.wait();  // a rank that leaves early would be reported
      },
      options);
  for (const std::string& error : errors) CHECK_EQ(error, errors[0]);
}

}  // namespace

TEST(operations_that_end_are_waited_for) {
  inRanks(2, [](Rank& rank) {
    for (int i = 0; i < 3; ++i) {
      rank.done = false;
      rank.start(100);
      const auto isKnown = [&] {
        const StreamProgress other = rank.group.epoch()->peers().streamsOf(1 - rank.group.rank());
        return other.announced >= 1 && other.oldest.count == 100 && other.begun;
      };
      if (i == 0) ranks::await("the other's progress is known", isKnown);
      CHECK(!rank.watchdog.wait(i == 0 ? kSoon : 0));
      rank.group.run({Barrier{}});
      rank.done = true;
      CHECK(rank.watchdog.wait(20 * kSecond));
    }
    rank.watchdog.check();
    CHECK(rank.watchdog.settle(0));
    CHECK(rank.ended == 0 && !rank.poisoned);
  });
}

TEST(a_timeout_names_who_did_not_come) {
  std::atomic<int> told{0};
  std::atomic<bool> rank_2_is_here{false};
  inRanks(4, [&](Rank& rank) {
    const bool absent = rank.group.rank() % 2 == 1;
    if (absent) ranks::await("the others have told", [&] { return told == 2; });
    if (absent) {
      CHECK(failureOf([&] { rank.start(100); }, "did not arrive") == Failure::kTimeout);
    } else {
      // If rank 2 had not come, rank 0 would name it too.
      if (rank.group.rank() == 0)
        ranks::await("rank 2 is here", [&] { return rank_2_is_here.load(); });
      rank.start(100, rank.group.rank() == 0 ? 6 * kSoon : 20 * kSecond);
      if (rank.group.rank() == 2) rank_2_is_here = true;
      CHECK(rank.ends("ranks 1 and 3 (pid ") == Failure::kTimeout);
      ++told;
      CHECK(rank.ends(") did not arrive: GPU all_reduce #0 (float32, 100 elements, SUM) timed out "
                      "after a timeout of 0.6 s") == Failure::kTimeout);
      CHECK(rank.poisoned);
      CHECK_EQ(rank.ended.load(), 1);
    }
  });
}

TEST(who_has_other_work_before_it_is_behind) {
  inRanks(2, [](Rank& rank) {
    if (rank.group.rank() == 0) rank.meet();  // the other comes first
    rank.start(100, 8 * kSoon, rank.group.rank() == 0);
    if (rank.group.rank() == 1) rank.meet();
    CHECK(rank.ends("came, but with other work in its stream before it") == Failure::kTimeout);
    CHECK(rank.ends("rank 1 (pid") == Failure::kTimeout);
  });
}

TEST(time_counts_from_when_the_stream_has_come_and_nobody_is_blamed_then) {
  inRanks(3, [](Rank& rank) {
    // The streams of the others have come.  Their timeouts are long, so only rank 0's clock can end
    // the wait.
    const bool comes_late = rank.group.rank() == 0;
    rank.start(100, comes_late ? kSoon : 20 * kSecond, !comes_late);
    rank.meet();
    if (comes_late) {
      CHECK(!rank.watchdog.wait(8 * kSoon));
      rank.begun = true;
    }
    CHECK(rank.ends("all ranks came") == Failure::kTimeout);
  });
}

TEST(ranks_that_wait_in_different_operations_are_told) {
  inRanks(3, [](Rank& rank) {
    rank.start(rank.group.rank() == 2 ? 101 : 100);
    CHECK(rank.ends("ranks disagree on GPU operation #0: rank") == Failure::kMismatch);
    CHECK(rank.ends("100 elements") == Failure::kMismatch);
    CHECK(rank.ends("101 elements") == Failure::kMismatch);
  });
}

TEST(an_abort_reaches_those_who_wait) {
  inRanks(3, [](Rank& rank) {
    if (rank.group.rank() != 1) rank.start(100);
    rank.meet();
    if (rank.group.rank() == 1) rank.watchdog.abort("for a test");
    CHECK(rank.ends("rank 1 (pid") == Failure::kAborted);
    CHECK(rank.ends("aborted group 'test': for a test; noticed by rank 1") == Failure::kAborted);
    CHECK(failureOf([&] { rank.start(1); }, "for a test") == Failure::kAborted);
  });
}

TEST(an_interrupt_ends_it_for_all) {
  static thread_local bool interrupted;
  GroupOptions options = named();
  options.interrupt = [] {
    if (interrupted) throw std::runtime_error("Ctrl-C");
  };
  ranks::MeetingPoint started(2);
  inRanks(
      2,
      [&](Rank& rank) {
        rank.start(100);
        // Not by a barrier: rank 0 would end the group while rank 1 is still in it.
        started.wait();
        interrupted = rank.group.rank() == 0;
        try {
          CHECK(rank.ends("interrupted while it waited for GPU operations") == Failure::kAborted);
        } catch (const std::runtime_error& error) {
          CHECK_EQ(std::string(error.what()), "Ctrl-C");
        }
        interrupted = false;
      },
      options);
}

// NCCL says that a rank is gone, but not which; a rank that knows is believed.
TEST(who_only_guesses_lets_others_tell_first) {
  inRanks(3, [](Rank& rank) {
    rank.start(100);
    sleepFor(rank.group.rank() == 1 ? 3 * kSoon : 0);
    (rank.group.rank() == 1 ? rank.host_failed : rank.broken) = true;
    CHECK(rank.ends("a neighbour died, in group 'test'; noticed by rank 1") == Failure::kPeerLost);
  });
  inRanks(2, [](Rank& rank) {
    rank.start(100);
    rank.broken = true;
    CHECK(rank.ends("NCCL says so, in group 'test'; noticed by rank") == Failure::kPeerLost);
    CHECK_EQ(rank.ended.load(), 1);
  });
}

TEST(a_gpu_that_fails_ends_it_for_all) {
  inRanks(2, [](Rank& rank) {
    if (rank.group.rank() == 0) {
      rank.start(100);
      rank.meet();
    } else {
      rank.watchdog.announce({.count = 100, .kind = Kind::kAllReduce});
      rank.meet();
      rank.watchdog.track(kSecond,
                          []() -> bool { throw Error(Failure::kSetup, "the GPU has failed"); });
    }
    CHECK(rank.ends("gave up: the GPU has failed") == Failure::kAborted);
  });
}

// Whatever NCCL does: its transfers never end here.  Rank 1 is killed at once, rank 2 stopped
// first.
TEST(killed_and_stopped_processes_are_named) {
  const ranks::Setting wire("RINGREDUCE_WIRE", "tcp");
  for (const int doomed : {1, 2})
    processes::inGroup(
        3,
        [&](Group& group) {
          Rank rank(group);
          const std::vector<pid_t> pids = gatherEach(group, getpid());
          // Rank 0, whose timeout is short, starts last.  Else it could name one that has not
          // started.
          const bool is_hasty = doomed == 2 && group.rank() == 0;
          if (!is_hasty) rank.start(100);
          group.run({Barrier{}});
          if (is_hasty) rank.start(100, kSecond);
          if (group.rank() == doomed) raise(doomed == 1 ? SIGKILL : SIGSTOP);
          const std::string error = rank.error();
          CHECK(error.starts_with("rank " + std::to_string(doomed) + " (pid "));
          CHECK(error.find(doomed == 1 ? ") is lost: its process ended during GPU all_reduce #0 "
                                         "(float32, 100 elements, SUM), in group 'test'; noticed"
                                       : ") came, and then stood still: GPU all_reduce #0") !=
                std::string::npos);
          CHECK(rank.poisoned);
          CHECK_EQ(rank.ended.load(), 1);
          if (doomed == 2 && group.rank() == 0) kill(pids[2], SIGKILL);
        },
        named(), {doomed});
}

TEST(a_rank_that_leaves_is_named) {
  const ranks::Setting wire("RINGREDUCE_WIRE", "tcp");
  ranks::inGroup(
      2,
      [](Group& group) {
        Rank rank(group);
        group.run({Barrier{}});
        if (group.rank() == 1) return;
        rank.start(100);
        CHECK(rank.ends("has left the group during GPU all_reduce #0") == Failure::kPeerLost);
      },
      named());
}
