// The way in to a process, over loopback: who gets in, and how long there is one.  Strangers are in
// net_strangers_test.cc.
#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "transport/tcp/acceptor.h"

#define CHECK_OWN_MAIN
#include "check.h"
#include "door.h"
#include "transport/tcp/reactor.h"

using namespace ringreduce;
using namespace ringreduce::net;
using namespace door;

TEST(who_knows_the_secret_is_let_in) {
  Group group;
  CHECK_EQ(group.acceptor->endpoint().addresses.size(), size_t{2});  // 127.0.0.1 and ::1
  group.admit();
  for (size_t address = 0; address < 4; ++address) {
    DialOptions options;
    options.address = address;
    const Socket ours = group.dial(options);
    const auto [theirs, caller] = group.inbox.next();
    CHECK(caller.group == group.word && caller.from == 0 && caller.to == 1 &&
          caller.connection == 7);
    CHECK(isUsable(ours) && isUsable(theirs));
    sockaddr_storage there{};
    socklen_t size = sizeof there;
    getpeername(ours.get(), reinterpret_cast<sockaddr*>(&there), &size);
    const Address reached(reinterpret_cast<sockaddr*>(&there), size);
    CHECK_EQ(reached.text(), group.acceptor->endpoint().addresses[address % 2].text());
    sendAll(ours, "to");
    sendAll(theirs, "and back");
    CHECK_EQ(receiveSome(theirs, 2), "to");
    CHECK_EQ(receiveSome(ours, 8), "and back");
  }
  CHECK_EQ(group.inbox.size(), size_t{0});
}

TEST(what_follows_the_handshake_at_once_is_not_lost) {
  Inbox inbox;
  Group group;
  group.token = group.acceptor->admit(group.word, 1, group.secret,
                                      [&](Socket socket, const PeerHello& caller) {
                                        sendAll(socket, std::string(100'000, 'x'));
                                        inbox.taken()(std::move(socket), caller);
                                      });
  for (int i = 0; i < 20; ++i) {
    const Socket ours = group.dial();
    CHECK(receiveSome(ours, 100'000) == std::string(100'000, 'x'));
  }
}

TEST(groups_and_ranks_of_one_process_share_a_port) {
  Group a, b;
  CHECK(a.acceptor == b.acceptor);
  Inbox third;
  a.admit();
  b.admit();
  const auto token = a.acceptor->admit(a.word, 2, a.secret, third.taken());
  CHECK(contains(failure([&] { a.acceptor->admit(a.word, 2, a.secret, third.taken()); }),
                 "in this process already"));
  const Socket to_b = b.dial(), to_a = a.dial();
  const Socket to_third =
      dial(a.acceptor->endpoint(), callerOf(a.word, 9, 2), a.secret, {}, "rank 2");
  CHECK_EQ(a.inbox.next().second.group, a.word);
  CHECK_EQ(b.inbox.next().second.group, b.word);
  CHECK_EQ(third.next().second.from, 9);
  // The secret of one does not open the other.
  CHECK(contains(
      failure([&] { dial(a.acceptor->endpoint(), callerOf(a.word), b.secret, {}, "rank 1"); }),
      "cannot reach rank 1 at 127.0.0.1:"));
  CHECK_EQ(a.inbox.size() + b.inbox.size() + third.size(), size_t{0});
}

TEST(many_get_in_at_once) {
  Group group;
  group.admit();
  constexpr int kThreads = 8, kEach = 25;
  std::atomic<int> in{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < kEach; ++i)
        if (group.dial()) ++in;
    });
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(in.load(), kThreads * kEach);
  for (int i = 0; i < kThreads * kEach; ++i) group.inbox.next();
}

TEST(who_calls_before_the_group_is_there_waits) {
  Group group;
  Socket ours;
  std::thread caller([&] { ours = group.dial(); });
  const Fd held = rawSocket(group.acceptor->endpoint().addresses[0]);
  sendAll(held, Handshake::dialler(callerOf(group.word), group.secret).takeOutput());
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK_EQ(group.inbox.size(), size_t{0});
  group.admit();
  caller.join();
  CHECK(ours && group.inbox.next().first);
  CHECK_EQ(receiveSome(held, 96).size(), size_t{96});  // it did not have to come again
}

TEST(a_group_that_never_comes_is_an_error) {
  Group group;
  DialOptions options;
  options.timeout = 200 * kMillisecond;
  const std::string text = failure([&] { group.dial(options); });
  CHECK(contains(text, "cannot reach rank 1 at 127.0.0.1:") && contains(text, "; at [::1]:"));
  CHECK(contains(text, "no handshake within 0.") && contains(text, "RINGREDUCE_IF"));
}

TEST(whoever_has_left_lets_nobody_in) {
  Group group;
  group.admit();
  const Socket before = group.dial();
  group.inbox.next();
  // One who is in the middle of it is dropped.
  const Fd half = rawSocket(group.acceptor->endpoint().addresses[0]);
  sendAll(half, Handshake::dialler(callerOf(group.word), group.secret).takeOutput());
  CHECK_EQ(receiveSome(half, 96).size(), size_t{96});
  group.token.reset();
  CHECK_EQ(receiveAll(half), "");
  DialOptions options;
  options.timeout = 50 * kMillisecond;
  CHECK(!failure([&] { group.dial(options); }).empty());
  CHECK_EQ(group.inbox.size(), size_t{0});
  group.admit();
  CHECK(group.dial());
}

TEST(being_let_in_may_end_everything) {
  Group group;
  std::atomic<bool> ended{false};
  std::shared_ptr<void> token;
  std::mutex mutex;
  const Endpoint endpoint = group.acceptor->endpoint();
  {
    const std::lock_guard lock(mutex);
    token = group.acceptor->admit(group.word, 1, group.secret, [&](Socket, const PeerHello&) {
      const std::lock_guard inner(mutex);
      token.reset();  // the last that held the acceptor
      ended = true;
    });
  }
  group.acceptor.reset();
  CHECK(dial(endpoint, callerOf(group.word), group.secret, {}, "rank 1"));
  await([&] { return ended.load(); });
  await([&] {
    return contains(failure([&] {
                      DialOptions options;
                      options.timeout = 100 * kMillisecond;
                      dial(endpoint, callerOf(group.word), group.secret, options, "rank 1");
                    }),
                    "connection refused");
  });
}

TEST(an_error_of_who_takes_is_not_the_end) {
  const Log log;
  Inbox inbox;
  std::atomic<int> calls{0};
  Group group;
  group.token = group.acceptor->admit(group.word, 1, group.secret,
                                      [&](Socket socket, const PeerHello& caller) {
                                        if (calls++ == 0) throw std::runtime_error("no room");
                                        inbox.taken()(std::move(socket), caller);
                                      });
  CHECK(group.dial());
  CHECK(group.dial());
  inbox.next();
  CHECK(contains(log.text(), "lost a connection of rank 0") && contains(log.text(), "no room"));
}

TEST(an_acceptor_goes_with_its_last_user) {
  std::optional<Endpoint> endpoint;
  {
    Group group;
    group.admit();
    endpoint = group.acceptor->endpoint();
    group.acceptor.reset();  // the token holds it
    CHECK(dial(*endpoint, callerOf(group.word), group.secret, {}, "rank 1"));
  }
  CHECK(contains(
      failure([&] { dial(*endpoint, callerOf(randomGroup()), randomSecret(), {}, "rank 1"); }),
      "connection refused; at [::1]"));
}

TEST(a_range_of_ports_that_is_used_up_is_an_error) {
  const Listener taken = listenOn({*Address::parse("127.0.0.1:0")}, {});
  setenv("RINGREDUCE_PORTS", std::to_string(taken.port).c_str(), 1);
  const std::string text = failure([] { Acceptor::shared(""); });
  setenv("RINGREDUCE_PORTS", "x", 1);
  const std::string other = failure([] { Acceptor::shared(""); });
  unsetenv("RINGREDUCE_PORTS");
  CHECK(contains(text, "RINGREDUCE_PORTS") && contains(text, "taken"));
  CHECK(contains(other, "RINGREDUCE_PORTS=x"));
  CHECK(Acceptor::shared("") != nullptr);
}

// ThreadSanitizer refuses threads in the child of a process that had some.
#ifndef __SANITIZE_THREAD__
TEST(a_forked_child_has_another) {
  Group group;
  group.admit();
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    bool fine = false;
    try {
      Group own;
      own.admit();
      fine = own.acceptor != group.acceptor &&
             own.acceptor->endpoint().addresses[0].port() !=
                 group.acceptor->endpoint().addresses[0].port() &&
             own.dial() && group.dial();
      own.inbox.next();
      group.token.reset();  // does nothing to the parent's
      group.acceptor.reset();
    } catch (const std::exception& error) {
      std::printf("in the child: %s\n", error.what());
      std::fflush(stdout);
      fine = false;
    }
    _exit(fine ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  group.inbox.next();
  CHECK(group.dial());
}
#endif

TEST(whoever_wants_encryption_gets_it_and_nothing_else) {
  if (!Tls::isBuiltIn()) return;
  for (const bool wanted_here : {false, true})
    for (const bool wanted_there : {false, true}) {
      Group group;
      group.token =
          group.acceptor->admit(group.word, 1, group.secret, group.inbox.taken(), wanted_here);
      PeerHello caller = callerOf(group.word);
      caller.encrypted = wanted_there;
      Socket ours = dial(group.acceptor->endpoint(), caller, group.secret, {}, "rank 1");
      if (wanted_here != wanted_there) {
        pollfd end{.fd = ours.get(), .events = POLLIN, .revents = 0};
        CHECK(poll(&end, 1, 60'000) == 1);  // it is closed
        CHECK_EQ(group.inbox.size(), size_t{0});
        continue;
      }
      auto [theirs, who] = group.inbox.next();
      CHECK(ours.isEncrypted() == wanted_here && theirs.isEncrypted() == wanted_here);
      CHECK(who.encrypted == wanted_here);
      CHECK_EQ(theirs.send("word", 4), ssize_t{4});
      pollfd news{.fd = ours.get(), .events = POLLIN, .revents = 0};
      CHECK(poll(&news, 1, 60'000) == 1);
      char heard[200];
      // What the socket itself holds is the word only where that was wanted.
      const ssize_t n = recv(ours.get(), heard, sizeof heard, MSG_PEEK | MSG_DONTWAIT);
      CHECK((n == 4 && std::string(heard, 4) == "word") == !wanted_here);
      CHECK_EQ(ours.receive(heard, sizeof heard), ssize_t{4});
      CHECK(std::string(heard, 4) == "word");
    }
}

int main(int argc, char** argv) {
  setenv("RINGREDUCE_IF", "lo", 1);
  return check::runAll(argc > 1 ? argv[1] : nullptr);
}
