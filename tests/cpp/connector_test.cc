// Connections made in the background: not too many at a time, one that takes long holds up no
// other, and nothing of it is left behind.
#include "transport/tcp/connector.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <set>
#include <stdexcept>

#include "base/error.h"
#include "check.h"
#include "sockets.h"

using namespace ringreduce;
using net::Connector;
using sockets::until;

namespace {

using Turn = std::function<void()>;

Fd something() {
  return Fd(open("/dev/null", O_RDONLY | O_CLOEXEC));
}

void nap() {
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace

TEST(each_call_is_answered_once_with_a_connection_or_why_there_is_none) {
  std::mutex mutex;
  std::multiset<std::string> results;
  Connector dialler([](int to, int number, const Turn&) -> Fd {
    if (to % 3 == 1) throw Error(Failure::kSetup, "no way to " + std::to_string(to));
    if (to % 3 == 2) throw 7;
    if (number == 1) return Fd();
    return something();
  });
  for (int round = 0; round < 20; ++round)
    for (int to = 0; to < 6; ++to)
      dialler.call(to, to == 3 ? 1 : 0,
                   [&, to](net::Socket socket, const net::ConnectFailure& error) {
                     const std::lock_guard lock(mutex);
                     CHECK(static_cast<bool>(socket) == error.why.empty());
                     results.insert(std::to_string(to) + ": " + (socket ? "made" : error.why));
                   });
  until(
      [&] {
        const std::lock_guard lock(mutex);
        return results.size() == 120;
      },
      "all calls to be answered");
  for (const char* result :
       {"0: made", "1: no way to 1", "2: an error of an unknown kind", "3: no connection was made",
        "4: no way to 4", "5: an error of an unknown kind"})
    CHECK_EQ(results.count(result), 20u);
}

TEST(no_more_than_a_bound_are_under_way_at_once) {
  std::atomic<int> under_way{0}, most{0}, made{0};
  std::atomic<bool> go{false};
  Connector dialler([&](int, int, const Turn& turn) {
    const int here = ++under_way;
    for (int known = most; known < here && !most.compare_exchange_weak(known, here);) {
    }
    for (; !go; nap()) turn();
    --under_way;
    return something();
  });
  for (int i = 0; i < 5 * Connector::kMostThreads; ++i)
    dialler.call(i, 0, [&](net::Socket, const net::ConnectFailure&) { ++made; });
  until([&] { return under_way == Connector::kMostThreads; }, "as many as may be");
  go = true;
  until([&] { return made == 5 * Connector::kMostThreads; }, "all to be made");
  CHECK_EQ(most.load(), Connector::kMostThreads);
}

TEST(those_that_take_long_give_way_and_are_tried_again) {
  std::atomic<bool> stopped{true};
  std::atomic<int> quick{0}, slow{0};
  Connector dialler([&](int to, int, const Turn& turn) {
    for (; to < 100 && stopped; nap()) turn();
    return something();
  });
  for (int i = 0; i < Connector::kMostThreads; ++i)
    dialler.call(i, 0,
                 [&](net::Socket socket, const net::ConnectFailure&) { slow += socket ? 1 : 0; });
  dialler.call(100, 0,
               [&](net::Socket socket, const net::ConnectFailure&) { quick += socket ? 1 : 0; });
  until([&] { return quick == 1; }, "the one that answers");
  CHECK_EQ(slow.load(), 0);
  stopped = false;
  until([&] { return slow == Connector::kMostThreads; }, "those that did not answer before");
}

TEST(it_gives_up_after_its_time_or_when_it_is_stopped) {
  const auto never = [](int, int, const Turn& turn) -> Fd {
    for (;; nap()) turn();
  };
  Connector impatient(never, 50 * kMillisecond);
  std::mutex mutex;
  std::string why;
  impatient.call(1, 0, [&](net::Socket, const net::ConnectFailure& error) {
    const std::lock_guard lock(mutex);
    why = error.why;
  });
  until(
      [&] {
        const std::lock_guard lock(mutex);
        return why == "it does not answer";
      },
      "the end of its time");
  std::atomic<int> told{0};
  Connector patient(never);
  for (int i = 0; i < 40; ++i)
    patient.call(i, 0, [&](net::Socket, const net::ConnectFailure&) { ++told; });
  patient.stop();
  patient.call(1, 0, [&](net::Socket, const net::ConnectFailure&) { ++told; });
  CHECK_EQ(told.load(), 0);
}

TEST(its_threads_take_no_signals) {
  std::atomic<int> blocked{-1};
  Connector dialler([&](int, int, const Turn&) {
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, nullptr, &mask);
    blocked =
        sigismember(&mask, SIGINT) && sigismember(&mask, SIGTERM) && sigismember(&mask, SIGCHLD);
    return something();
  });
  sigset_t before, after;
  pthread_sigmask(SIG_SETMASK, nullptr, &before);
  dialler.call(0, 0, [](net::Socket, const net::ConnectFailure&) {});
  pthread_sigmask(SIG_SETMASK, nullptr, &after);
  until([&] { return blocked >= 0; }, "the dial");
  CHECK_EQ(blocked.load(), 1);
  CHECK_EQ(sigismember(&before, SIGINT), sigismember(&after, SIGINT));
}

TEST(where_no_thread_can_be_started_the_caller_is_told) {
  // No machine has room for such a stack.
  pthread_attr_t usual, huge;
  CHECK(pthread_getattr_default_np(&usual) == 0 && pthread_attr_init(&huge) == 0);
  CHECK(pthread_attr_setstacksize(&huge, size_t{1} << 48) == 0);
  CHECK(pthread_setattr_default_np(&huge) == 0);
  std::string why;
  int calls = 0;
  Connector dialler([](int, int, const Turn&) { return something(); });
  dialler.call(0, 0, [&](net::Socket, const net::ConnectFailure& error) {
    ++calls;
    why = error.why;
  });
  CHECK(pthread_setattr_default_np(&usual) == 0);
  CHECK_EQ(calls, 1);
  CHECK_EQ(why.find("ringreduce cannot start a thread that connects to it"), 0u);
  std::atomic<int> made{0};
  dialler.call(0, 0,
               [&](net::Socket socket, const net::ConnectFailure&) { made += socket ? 1 : 0; });
  until([&] { return made == 1; }, "the next one");
  pthread_attr_destroy(&usual);
  pthread_attr_destroy(&huge);
}

TEST(a_forked_child_may_drop_it) {
  std::atomic<bool> go{false}, under_way{false};
  auto dialler = std::make_unique<Connector>([&](int, int, const Turn& turn) {
    under_way = true;
    for (; !go; nap()) turn();
    return something();
  });
  dialler->call(0, 0, [](net::Socket, const net::ConnectFailure&) {});
  until([&] { return under_way.load(); }, "the dial");
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    dialler->call(1, 0, [](net::Socket, const net::ConnectFailure&) {});
    dialler.reset();
    _exit(0);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  go = true;
}
