// The way in to a process, over loopback: who gets in, who does not, and what it costs.
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

#include "net/acceptor.h"

#define CHECK_OWN_MAIN
#include "check.h"
#include "door.h"
#include "net/complaints.h"
#include "net/reactor.h"

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
    CHECK(caller.group == group.word && caller.from == 0 && caller.to == 1 && caller.lane == 7);
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
  group.token =
      group.acceptor->admit(group.word, 1, group.secret, [&](Socket socket, const Caller& caller) {
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
    token = group.acceptor->admit(group.word, 1, group.secret, [&](Socket, const Caller&) {
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
  group.token =
      group.acceptor->admit(group.word, 1, group.secret, [&](Socket socket, const Caller& caller) {
        if (calls++ == 0) throw std::runtime_error("no room");
        inbox.taken()(std::move(socket), caller);
      });
  CHECK(group.dial());
  CHECK(group.dial());
  inbox.next();
  CHECK(contains(log.text(), "lost a connection of rank 0") && contains(log.text(), "no room"));
}

TEST(another_secret_is_refused_at_once) {
  const Log log;
  Group group;
  group.admit();
  // A port of the other family must not be what is reported alone.
  const std::string text = failure([&] {
    dial(group.acceptor->endpoint(), callerOf(group.word), randomSecret(), {}, "rank 1 (host b)");
  });
  CHECK(contains(text, "cannot reach rank 1 (host b) at 127.0.0.1:"));
  CHECK(contains(text, "another secret"));
  // And whoever proves the wrong thing.
  const Fd wrong = rawSocket(group.acceptor->endpoint().addresses[0]);
  sendAll(wrong, Handshake::dialler(callerOf(group.word), randomSecret()).takeOutput());
  CHECK_EQ(receiveSome(wrong, 96).size(), size_t{96});
  sendAll(wrong, std::string(32, 'x'));
  CHECK_EQ(receiveAll(wrong), "");
  CHECK_EQ(group.inbox.size(), size_t{0});
  CHECK(contains(log.text(), "refused a connection from 127.0.0.1:") &&
        contains(log.text(), "another secret"));
}

TEST(a_call_for_a_rank_that_has_just_left_is_no_strangers) {
  const Log log;
  Group group;
  group.admit();
  group.token.reset();
  const size_t before = openFds();
  const auto callAndGo = [&](const std::string& word, int to) {
    const Fd fd = rawSocket(group.acceptor->endpoint().addresses[0]);
    sendAll(fd, Handshake::dialler(callerOf(word, 0, to), group.secret).takeOutput());
    await([&] { return openFds() == before + 2; });  // it was taken
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  };
  callAndGo(group.word, 1);
  await([&] { return openFds() == before; });
  CHECK_EQ(log.text(), "");
  // One of this group that never was here is.
  callAndGo(group.word, 2);
  await([&] { return log.lines() == 1; });
}

TEST(another_version_is_told_and_logged) {
  const Log log;
  Group group;
  group.admit();
  std::string hello = Handshake::dialler(callerOf(group.word), group.secret).takeOutput();
  const std::string ours = hello.substr(0, 32);
  std::string theirs = "ringreduce 99.0.0 wire 9\n";
  theirs.resize(32);
  hello.replace(0, 32, theirs);
  for (const Address& address : group.acceptor->endpoint().addresses) {
    const Fd fd = rawSocket(address);
    sendAll(fd, hello + std::string(1000, 'x'));
    CHECK(receiveSome(fd, 32) == ours);
    // An end in order: a reset could destroy what is still on its way.
    char byte;
    CHECK(recv(fd.get(), &byte, 1, 0) == 0);
  }
  CHECK(contains(log.text(), "ringreduce 99.0.0 wire 9, this is ringreduce"));

  const Other other;
  std::string text;
  std::thread caller([&] {
    text =
        failure([&] { dial(other.endpoint(), callerOf(group.word), group.secret, {}, "rank 1"); });
  });
  const Fd fd = other.accept();
  sendAll(fd, theirs);
  caller.join();
  CHECK(contains(text, "is ringreduce 99.0.0 wire 9") && contains(text, "install the same"));
}

TEST(strangers_cost_nothing_lasting) {
  const Log log;
  Group group;
  group.admit();
  const auto& addresses = group.acceptor->endpoint().addresses;
  const std::string hello = Handshake::dialler(callerOf(group.word), group.secret).takeOutput();
  const std::string unknown =
      Handshake::dialler(callerOf(randomGroup()), group.secret).takeOutput();
  const size_t before = openFds();
  // All kinds, and ranks that get in among them.
  std::vector<Fd> kept;
  for (int i = 0; i < 2000; ++i) {
    Fd fd = rawSocket(addresses[static_cast<size_t>(i) % 2]);
    switch (i % 8) {
      case 0:
        break;  // says nothing
      case 1:
        sendAll(fd, std::string(64, 'x'));
        break;
      case 2:
        sendAll(fd, hello.substr(0, static_cast<size_t>(i) % hello.size()));
        break;
      case 3:
        sendAll(fd, hello);  // and never its proof
        break;
      case 4:
        sendAll(fd, unknown);
        break;
      case 5:
        sendAll(fd, hello);
        fd.reset();
        break;
      case 6:
        sendAll(fd, unknown + unknown);
        shutdown(fd.get(), SHUT_WR);
        break;
      case 7:
        fd.reset();
        break;
    }
    if (fd) kept.push_back(std::move(fd));
    if (i % 100 == 50) {
      CHECK(group.dial());
      group.inbox.next();
    }
    // No more than are let stand, on this side and on that.
    if (i % 20 == 0) CHECK(openFds() <= before + kept.size() + 256 + 4);
    if (kept.size() > 400) kept.erase(kept.begin(), kept.begin() + 300);
  }
  CHECK(group.dial());
  group.inbox.next();
  // One that says a byte now and then gains nothing by it.  When its time is over nobody is left.
  const Fd slow = rawSocket(addresses[0]);
  for (size_t at = 0;; ++at) {
    sendAll(slow, hello.substr(at % 90, 1));
    pollfd wanted{.fd = slow.get(), .events = POLLIN, .revents = 0};
    if (poll(&wanted, 1, 100) > 0) break;
    CHECK(at < 600);
  }
  await([&] { return openFds() <= before + kept.size() + 1; });
  for (const Fd& fd : kept) {
    char byte;
    ssize_t got;
    while ((got = recv(fd.get(), &byte, 1, MSG_DONTWAIT)) > 0) {
    }
    CHECK(got == 0 || errno != EAGAIN);
  }
  CHECK_EQ(group.inbox.size(), size_t{0});
  CHECK(log.lines() >= 1 && log.lines() <= 3);  // once a minute, however slow this machine is
}

TEST(a_flood_of_the_held_does_not_drop_who_is_known) {
  const Log log;
  Group group;
  group.admit();
  const Address& address = group.acceptor->endpoint().addresses[0];
  const Handshake fresh = Handshake::dialler(callerOf(group.word), group.secret);
  Handshake machine = fresh;
  const Fd known = rawSocket(address);
  sendAll(known, machine.takeOutput());
  const std::string challenge = receiveSome(known, 96);
  std::vector<Fd> held;
  const std::string unknown =
      Handshake::dialler(callerOf(randomGroup()), group.secret).takeOutput();
  for (int i = 0; i < 600; ++i) {
    held.push_back(rawSocket(address));
    sendAll(held.back(), unknown);
  }
  // The oldest of the held go.
  CHECK_EQ(receiveAll(held[0]), "");
  machine.feed(std::as_bytes(std::span(challenge)));
  sendAll(known, machine.takeOutput());
  CHECK_EQ(receiveSome(known, 32).size(), size_t{32});
  group.inbox.next();
}

TEST(no_descriptors_left_is_waited_for_without_spinning) {
  const Log log;
  Group group;
  group.admit();
  // Connections that are made, but not yet taken; and then no descriptor is left to take them.
  Fd waiting(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  Handshake machine = Handshake::dialler(callerOf(group.word), group.secret);
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  rlimit low = limit;
  low.rlim_cur = static_cast<rlim_t>(dup(0));
  close(static_cast<int>(low.rlim_cur));
  setrlimit(RLIMIT_NOFILE, &low);
  const Address& address = group.acceptor->endpoint().addresses[0];
  connect(waiting.get(), address.get(), address.length());
  pollfd wanted{.fd = waiting.get(), .events = POLLOUT, .revents = 0};
  poll(&wanted, 1, 60'000);
  sendAll(waiting, machine.takeOutput());
  const auto processorTime = [] {
    timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return time.tv_sec * kSecond + time.tv_nsec;
  };
  const Nanos before = processorTime();
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  const Nanos used = processorTime() - before;
  setrlimit(RLIMIT_NOFILE, &limit);
  CHECK(used < 40 * kMillisecond);  // a thread that spins gets that on any machine
  const std::string challenge = receiveSome(waiting, 96);
  machine.feed(std::as_bytes(std::span(challenge)));
  sendAll(waiting, machine.takeOutput());
  CHECK_EQ(receiveSome(waiting, 32).size(), size_t{32});
  group.inbox.next();
  CHECK(contains(log.text(), "ulimit -n"));
}

TEST(complaints_are_counted) {
  const Log log;
  const auto reactor = Reactor::shared();
  {
    Complaints complaints(reactor, 50 * kMillisecond);
    reactor->run([&] {
      for (int i = 0; i < 10; ++i) complaints.add("number " + std::to_string(i));
    });
    CHECK_EQ(log.text(), "[ringreduce] number 0\n");
    await([&] { return log.lines() == 2; });
    CHECK(contains(log.text(), "number 9 (and 8 others"));
    reactor->run([&] {
      complaints.add("later");
      complaints.add("last");
    });
    CHECK_EQ(log.lines(), size_t{3});
  }
  CHECK_EQ(log.lines(), size_t{4});  // nothing is forgotten at the end
  CHECK(contains(log.text(), "last\n"));
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
      Caller caller = callerOf(group.word);
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
