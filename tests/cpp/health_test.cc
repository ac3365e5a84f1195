// A group's health as those see it who wait for other ranks by other means than operations.
#include <pthread.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <thread>

#include "bootstrap/process.h"
#include "check.h"
#include "processes.h"
#include "ranks.h"

using namespace ringreduce;
using ranks::failureOf;
using ranks::sleepMs;

TEST(a_process_that_ended_is_seen_and_lost) {
  processes::inGroup(
      3,
      [](Group& group) {
        CHECK(group.epoch()->peers().states() == std::vector<PeerState>(3));
        group.run({Barrier{}});
        if (group.rank() == 2) raise(SIGKILL);
        while (group.epoch()->peers().states()[2].isHere()) sleepMs(1);
        CHECK(group.epoch()->peers().states()[2].observed == Observed::kEnded &&
              group.epoch()->peers().states()[2].isGone());
        if (group.rank() == 0) group.checkHealth();  // nobody has missed it yet
        while (group.rank() == 1 && !group.failed()) sleepMs(1);
        CHECK(failureOf([&] { group.epoch()->arbiter->failLost(2, "in the midst of a test"); },
                        "is lost: its process ended in the midst of a test, in group 'test'") ==
              Failure::kPeerLost);
        CHECK(failureOf([&] { group.checkHealth(); }, "rank 2 (pid") == Failure::kPeerLost);
      },
      {}, {2});
}

TEST(a_rank_that_left_is_seen_and_lost) {
  ranks::inGroup(3, [](Group& group) {
    if (group.rank() == 1) return;
    while (group.epoch()->peers().states()[1].isHere()) sleepMs(1);
    CHECK(group.epoch()->peers().states()[1].declared != Declared::kHere &&
          !group.epoch()->peers().states()[1].isLost());
    if (group.rank() == 0) group.checkHealth();
    while (group.rank() == 2 && !group.failed()) sleepMs(1);
    CHECK(failureOf([&] { group.epoch()->arbiter->failLost(1, "before it was due"); },
                    "has left the group before it was due") == Failure::kPeerLost);
  });
}

TEST(a_failure_told_by_one_thread_ends_operations_and_waits_of_all_ranks) {
  ranks::inGroup(4, [](Group& group) {
    const auto says = [](const std::string& text) {
      return "the GPU of rank 3 stands still" + text;
    };
    if (group.rank() == 0) {  // an operation, which rank 3 never comes to
      CHECK(failureOf([&] { group.run({Barrier{}}); }, says("")) == Failure::kTimeout);
    } else if (group.rank() == 1) {  // one in the group's own thread
      const auto ticket = group.submit({Barrier{}}, nullptr);
      group.await(*ticket, kNever);
      CHECK(failureOf([&] { std::rethrow_exception(ticket->error()); }, says("")) ==
            Failure::kTimeout);
    } else if (group.rank() == 2) {  // no operation, in a thread of its own
      std::thread([&] {
        while (failureOf([&] { group.checkHealth(); }) == Failure::kNone) sleepMs(1);
      }).join();
      CHECK(failureOf([&] { group.checkHealth(); },
                      says(", in group 'test'; noticed by rank 3, learned by rank 2")) ==
            Failure::kTimeout);
    } else {
      sleepMs(30);
      std::thread([&] {
        CHECK(failureOf([&] { group.epoch()->arbiter->fail(Failure::kTimeout, 3, says("")); },
                        says("")) == Failure::kTimeout);
      }).join();
    }
    CHECK(group.failure() == Failure::kTimeout);
    // A failure is final.
    CHECK(failureOf([&] { group.epoch()->arbiter->fail(Failure::kPeerLost, 0, "something else"); },
                    says("")) == Failure::kTimeout);
  });
}

TEST(who_and_where_a_rank_is) {
  ranks::inGroup(
      2,
      [](Group& group) {
        group.run({Barrier{}});
        const std::string pid = std::to_string(getpid());
        CHECK(group.epoch()->peers().who(1).starts_with("rank 7 (pid " + pid + " on host "));
        CHECK(group.epoch()->peers().whereabouts({1}).starts_with("rank 7 (pid " + pid +
                                                                  " on host "));
        CHECK(group.epoch()->peers().whereabouts({1}).find(", last seen in barrier #") !=
              std::string::npos);
        CHECK_EQ(group.options().name, "test");
        group.run({Barrier{}});
      },
      {.name = "test", .global_ranks = {5, 7}});
}

TEST(ctrl_c_in_a_wait_of_ones_own_ends_the_group) {
  struct CtrlC {};
  static thread_local bool pressed = false;
  GroupOptions options{.name = "test"};
  options.interrupt = [] {
    if (pressed) throw CtrlC();
  };
  ranks::inGroup(
      2,
      [](Group& group) {
        group.interrupt("while all was well");
        if (group.rank() == 0) {
          pressed = true;
          bool thrown = false;
          try {
            group.interrupt("while it waited for a GPU");
          } catch (const CtrlC&) {
            thrown = true;
          }
          CHECK(thrown);
        }
        while (!group.failed()) sleepMs(1);
        CHECK(failureOf([&] { group.checkHealth(); }, "interrupted while it waited for a GPU") ==
              Failure::kAborted);
      },
      options);
}

TEST(a_forked_child_is_refused) {
  processes::inGroup(1, [](Group& group) {
    const pid_t child = fork();
    if (child == 0) {
      const bool refused =
          failureOf([&] { group.checkHealth(); }, "was forked from rank 0") == Failure::kArgument &&
          failureOf([&] { group.epoch(); }) == Failure::kArgument;
      _exit(refused ? 0 : 1);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK_EQ(status, 0);
    group.checkHealth();
  });
}

// A process on its way to its end has closed its pipe, but its pidfd does not show it yet.
TEST(exec_is_only_said_of_a_process_that_goes_on) {
  int ends[2];
  CHECK(pipe(ends) == 0);
  const auto closed = std::make_shared<Fd>(ends[0]);
  close(ends[1]);
  CHECK_EQ(howEnded({.pidfd = nullptr, .pipe = closed}), kProcessEndedOrReplaced);
  for (const bool is_ending : {false, true}) {
    const pid_t child = fork();
    if (child == 0) {
      // As the first thread of a process that ends, while the others end.
      std::thread([] { sleepMs(60'000); }).detach();
      if (is_ending) pthread_exit(nullptr);
      sleepMs(60'000);
      _exit(0);
    }
    const auto pidfd = std::make_shared<Fd>(static_cast<int>(syscall(SYS_pidfd_open, child, 0)));
    CHECK(*pidfd);
    const ProcessFds process{.pidfd = pidfd, .pipe = closed};
    if (is_ending)  // as long as its first thread runs, it looks like the other process
      ranks::await("its first thread has ended",
                   [&] { return howEnded(process) == kProcessEndedOrReplaced; });
    else
      sleepMs(200);
    CHECK(ended({process})[0] && !hasExited(process));
    CHECK_EQ(howEnded(process), is_ending ? kProcessEndedOrReplaced : kProcessReplaced);
    ::kill(child, SIGKILL);
    ranks::await("the child has ended", [&] { return hasExited(process); });
    CHECK_EQ(howEnded(process), kProcessEnded);
    CHECK_EQ(waitpid(child, nullptr, 0), child);
  }
}
