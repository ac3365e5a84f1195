// The thread that looks after sockets: who is called when, what forgetting promises, how it ends.
#include "transport/tcp/reactor.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/fd.h"
#include "check.h"

using namespace ringreduce;
using net::Reactor;

namespace {

#ifdef __SANITIZE_THREAD__
constexpr bool kThreadSanitizer = true;
#else
constexpr bool kThreadSanitizer = false;
#endif

std::pair<Fd, Fd> pairOfSockets() {
  int fds[2];
  CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0);
  return {Fd(fds[0]), Fd(fds[1])};
}

void put(const Fd& fd) {
  CHECK_EQ(write(fd.get(), "x", 1), 1);
}
void take(const Fd& fd) {
  char byte;
  CHECK_EQ(read(fd.get(), &byte, 1), 1);
}

void until(const std::function<bool()>& ready) {
  const auto start = std::chrono::steady_clock::now();
  while (!ready()) {
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(20));
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

// Threads of this process that look after sockets.
int reactorThreads() {
  int found = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name;
    std::ifstream(task.path() / "comm") >> name;
    found += name == "ringreduce-net";
  }
  return found;
}

}  // namespace

TEST(there_is_one_thread_from_the_first_user_to_the_last) {
  CHECK_EQ(reactorThreads(), 0);
  auto first = Reactor::shared();
  auto second = Reactor::shared();
  CHECK(first == second);
  first->run([] {});  // it has its name by now
  CHECK_EQ(reactorThreads(), 1);
  first.reset();
  CHECK_EQ(reactorThreads(), 1);
  second.reset();
  until([] { return reactorThreads() == 0; });
  for (int i = 0; i < 20; ++i) Reactor::shared()->run([] {});
  until([] { return reactorThreads() == 0; });
}

TEST(a_socket_is_served_as_long_as_there_is_something_to_read) {
  const auto reactor = Reactor::shared();
  auto [mine, other] = pairOfSockets();
  std::atomic<int> taken{0};
  std::atomic<uint32_t> seen{0};
  reactor->watch(mine.get(), EPOLLIN, [&, fd = mine.get()](uint32_t events) {
    seen |= events;
    char byte;
    if (read(fd, &byte, 1) == 1) ++taken;  // one at a time
  });
  for (int i = 0; i < 100; ++i) put(other);
  until([&] { return taken == 100; });
  CHECK_EQ(seen.load(), static_cast<uint32_t>(EPOLLIN));
  reactor->change(mine.get(), EPOLLIN | EPOLLOUT);
  until([&] { return (seen & EPOLLOUT) != 0; });
  reactor->change(mine.get(), EPOLLIN);
  other.reset();
  until([&] { return (seen & EPOLLHUP) != 0; });
  reactor->forget(mine.get());
  reactor->forget(mine.get());  // no more than nothing
  reactor->change(mine.get(), EPOLLIN);
}

TEST(who_has_forgotten_may_free_what_the_callback_uses) {
  const auto reactor = Reactor::shared();
  std::mt19937 random(1);
  for (int i = 0; i < 400; ++i) {
    auto [mine, other] = pairOfSockets();
    auto calls = std::make_unique<int>(0);  // not atomic: the reactor orders these
    auto owned = std::make_shared<int>(0);
    const std::weak_ptr<int> watched = owned;
    reactor->watch(mine.get(), EPOLLIN, [&calls, owned = std::move(owned)](uint32_t) {
      ++*calls;
      std::this_thread::yield();
      ++*owned;
    });
    put(other);
    for (unsigned n = random() % 5; n > 0; --n) std::this_thread::yield();
    reactor->forget(mine.get());
    CHECK(watched.expired());
    ++*calls;
    calls.reset();
  }
}

TEST(a_cancelled_timer_does_not_run_any_more) {
  const auto reactor = Reactor::shared();
  std::mt19937 random(2);
  for (int i = 0; i < 400; ++i) {
    auto calls = std::make_unique<int>(0);
    const auto timer = reactor->at(now() + static_cast<Nanos>(random() % 2) * kMillisecond / 2,
                                   [&calls] { ++*calls; });
    CHECK(timer != 0);
    for (unsigned n = random() % 5; n > 0; --n) std::this_thread::yield();
    reactor->cancel(timer);
    ++*calls;
    CHECK(*calls <= 2);
    calls.reset();
    reactor->cancel(timer);
  }
  reactor->cancel(0);
}

TEST(timers_run_once_in_their_order_and_never_early) {
  const auto reactor = Reactor::shared();
  std::vector<int> order;
  std::atomic<int> ran{0};
  std::atomic<bool> early{false};
  const Nanos start = now();
  for (int i = 9; i >= 0; --i) {
    const Nanos when = start + i * 2 * kMillisecond;
    reactor->at(when, [&, i, when] {
      if (now() < when) early = true;
      order.push_back(i);
      ++ran;
    });
  }
  until([&] { return ran == 10; });
  reactor->run([] {});
  CHECK(!early);
  CHECK(std::is_sorted(order.begin(), order.end()));
  // One that sets itself anew.
  std::atomic<int> rounds{0};
  std::function<void()> again = [&] {
    if (++rounds < 50) reactor->at(now(), again);
  };
  reactor->at(now(), again);
  until([&] { return rounds == 50; });
  reactor->run([] {});
  reactor->cancel(reactor->at(kNever, [] {}));
}

TEST(a_callback_may_forget_itself_and_others) {
  const auto reactor = Reactor::shared();
  auto [one, one_end] = pairOfSockets();
  auto [two, two_end] = pairOfSockets();
  std::atomic<int> calls{0};
  // Both are ready in the same round: whichever runs first is the only one.
  const auto ready = [&, a = one.get(), b = two.get()](uint32_t) {
    reactor->forget(a);
    reactor->forget(b);
    ++calls;
  };
  reactor->run([&] {
    reactor->watch(one.get(), EPOLLIN, ready);
    reactor->watch(two.get(), EPOLLIN, ready);
    put(one_end);
    put(two_end);
  });
  until([&] { return calls == 1; });
  for (int i = 0; i < 3; ++i) reactor->run([] {});
  CHECK_EQ(calls.load(), 1);
  // Its number, used again by the next one, is not what was forgotten.
  const int number = one.get();
  one.reset();
  auto [again, again_end] = pairOfSockets();
  std::atomic<int> fresh{0};
  reactor->watch(again.get(), EPOLLIN, [&](uint32_t) {
    take(again);
    ++fresh;
  });
  put(again_end);
  until([&] { return fresh == 1; });
  CHECK_EQ(again.get(), number);
  reactor->forget(again.get());
}

TEST(what_a_callback_throws_ends_that_socket_alone) {
  const auto reactor = Reactor::shared();
  auto [bad, bad_end] = pairOfSockets();
  auto [good, good_end] = pairOfSockets();
  std::atomic<int> thrown{0}, served{0};
  reactor->watch(bad.get(), EPOLLIN, [&](uint32_t) {
    ++thrown;
    throw std::runtime_error("a test's error, which is to be logged");
  });
  reactor->watch(good.get(), EPOLLIN, [&](uint32_t) {
    take(good);
    ++served;
  });
  put(bad_end);
  put(good_end);
  until([&] { return thrown == 1 && served == 1; });
  put(bad_end);
  put(good_end);
  until([&] { return served == 2; });
  CHECK_EQ(thrown.load(), 1);
  reactor->at(now(), [] { throw 1; });
  reactor->soon([] { throw std::runtime_error("another one"); });
  CHECK_THROWS(std::logic_error, reactor->run([] { throw std::logic_error("the caller's"); }));
  reactor->forget(bad.get());
  reactor->forget(good.get());
  CHECK_THROWS(ringreduce::Error, reactor->watch(-1, EPOLLIN, [](uint32_t) {}));
}

TEST(what_is_to_be_done_soon_is_done_in_order_also_at_the_end) {
  std::vector<int> order;
  {
    const auto reactor = Reactor::shared();
    for (int i = 0; i < 100; ++i) reactor->soon([&, i] { order.push_back(i); });
    std::thread::id there;
    reactor->run([&] {
      there = std::this_thread::get_id();
      reactor->run([&] { CHECK(there == std::this_thread::get_id()); });
    });
    CHECK(there != std::this_thread::get_id());
    CHECK_EQ(order.size(), size_t{100});
    reactor->soon([&] { order.push_back(100); });
  }
  CHECK_EQ(order.size(), size_t{101});
  CHECK(std::is_sorted(order.begin(), order.end()));
}

TEST(the_last_user_may_be_dropped_by_a_callback) {
  for (int i = 0; i < 50; ++i) {
    auto [mine, other] = pairOfSockets();
    struct User {
      std::shared_ptr<Reactor> reactor;
      Fd socket;
      ~User() { reactor->forget(socket.get()); }
    };
    auto user = std::make_shared<User>();
    user->reactor = Reactor::shared();
    user->socket = std::move(mine);
    std::atomic<bool> done{false};
    auto* raw = user.get();
    Reactor& reactor = *raw->reactor;
    const int fd = raw->socket.get();
    reactor.watch(fd, EPOLLIN, [&done, user = std::move(user)](uint32_t) mutable {
      user.reset();
      done = true;
    });
    put(other);
    until([&] { return done.load(); });
    until([] { return reactorThreads() == 0; });
  }
  // The same where what is dropped is the callback itself, by a timer of its own.
  auto keeps = Reactor::shared();
  Reactor& reactor = *keeps;
  std::atomic<bool> ran{false};
  reactor.at(now(), [&ran, keeps = std::move(keeps)] { ran = true; });
  until([&] { return ran.load() && reactorThreads() == 0; });
}

TEST(many_threads_at_once) {
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (unsigned t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      try {
        for (int i = 0; i < 100; ++i) {
          const auto reactor = Reactor::shared();
          auto [mine, other] = pairOfSockets();
          int served = 0, timed = 0, ran = 0;
          reactor->watch(mine.get(), EPOLLIN, [&](uint32_t) {
            ++served;
            reactor->change(mine.get(), 0);
          });
          const auto timer = reactor->at(now() + 50 * kMicrosecond, [&] { ++timed; });
          put(other);
          if (random() % 2) reactor->run([&] { ++ran; });
          reactor->forget(mine.get());
          reactor->cancel(timer);
          CHECK(served <= 1 && timed <= 1 && ran <= 1);
        }
      } catch (const std::exception&) {
        ++failures;
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(failures.load(), 0);
  until([] { return reactorThreads() == 0; });
}

TEST(a_forked_child_has_one_of_its_own_and_leaves_the_parents_alone) {
  auto reactor = Reactor::shared();
  auto [mine, other] = pairOfSockets();
  std::atomic<int> served{0};
  reactor->watch(mine.get(), EPOLLIN, [&](uint32_t) {
    take(mine);
    ++served;
  });
  const auto timer = reactor->at(now() + 10 * kSecond, [] {});
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    int wrong = 0;
    reactor->forget(mine.get());
    reactor->cancel(timer);
    reactor->run([&] { wrong |= 1; });
    reactor->soon([&] { wrong |= 1; });
    reactor->watch(0, EPOLLIN, [&](uint32_t) { wrong |= 1; });
    if (reactor->at(now(), [&] { wrong |= 1; }) != 0) wrong |= 2;
    reactor.reset();          // the parent's thread is not here to be waited for
    if (!kThreadSanitizer) {  // which has no threads in a child of a process with threads
      auto own = Reactor::shared();
      bool ran = false;
      own->run([&] { ran = true; });
      if (!ran) wrong |= 4;
      own.reset();
      for (int i = 0; i < 100 && reactorThreads() != 0; ++i)
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
      if (reactorThreads() != 0) wrong |= 8;
    }
    _exit(wrong);
  }
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status));
  CHECK_EQ(WEXITSTATUS(status), 0);
  put(other);
  until([&] { return served == 1; });
  reactor->forget(mine.get());
  reactor->cancel(timer);
}
