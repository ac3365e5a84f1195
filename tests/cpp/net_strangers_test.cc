// Who does not get into a process, over loopback, what that costs it, and what is logged of it.
#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
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

TEST(silent_strangers_leave_descriptors_for_groups) {
  const Log log;
  Group group;
  group.admit();
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  rlimit low = limit;
  low.rlim_cur = openFds() + 80;
  setrlimit(RLIMIT_NOFILE, &low);
  int ends[2];
  CHECK_EQ(pipe(ends), 0);
  const pid_t stranger = fork();
  if (stranger == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // a test that fails does not get to end it
    setrlimit(RLIMIT_NOFILE, &limit);
    const Address& address = group.acceptor->endpoint().addresses[0];
    for (int i = 0; i < 600; ++i) {
      const int fd = socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC, 0);
      if (connect(fd, address.get(), address.length()) != 0) _exit(1);
    }
    if (write(ends[1], "x", 1) == 1) pause();
    _exit(1);
  }
  close(ends[1]);  // so that the read ends if the stranger does
  char byte = 0;
  CHECK_EQ(read(ends[0], &byte, 1), 1);
  std::vector<Socket> kept;
  for (int i = 0; i < 20; ++i) {  // two descriptors of this process each
    kept.push_back(group.dial());
    kept.push_back(group.inbox.next().first);
  }
  kill(stranger, SIGKILL);
  waitpid(stranger, nullptr, 0);
  close(ends[0]);
  setrlimit(RLIMIT_NOFILE, &limit);
  CHECK(contains(log.text(), "too many connect at once"));
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
    RateLimitedLog complaints(reactor, 50 * kMillisecond);
    std::string text;
    size_t lines = 0;
    reactor->run([&] {
      for (int i = 0; i < 10; ++i) complaints.add("number " + std::to_string(i));
      text = log.text();  // here, where no interval ends meanwhile
    });
    CHECK_EQ(text, "[ringreduce] number 0\n");
    await([&] { return log.lines() == 2; });
    CHECK(contains(log.text(), "number 9 (and 8 others"));
    reactor->run([&] {
      complaints.add("later");
      complaints.add("last");
      lines = log.lines();
    });
    CHECK_EQ(lines, size_t{3});
  }
  CHECK_EQ(log.lines(), size_t{4});  // nothing is forgotten at the end
  CHECK(contains(log.text(), "last\n"));
}

int main(int argc, char** argv) {
  setenv("RINGREDUCE_IF", "lo", 1);
  return check::runAll(argc > 1 ? argv[1] : nullptr);
}
