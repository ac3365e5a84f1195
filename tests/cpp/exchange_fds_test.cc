// Descriptors between the ranks of a group, and host memory that all of them map.  Ranks as
// processes and as threads; one that dies, one that does not come, strangers at the socket.
#include "group/exchange_fds.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <array>
#include <filesystem>

#include "bootstrap/unix_socket.h"
#include "check.h"
#include "group/agreement.h"
#include "processes.h"
#include "ranks.h"

using namespace ringreduce;
using ranks::failureOf;
using ranks::sleepMs;
using ranks::waitForFailure;

namespace {

using Body = std::function<void(Group&)>;

// A descriptor with a word in it.
Fd holding(const std::string& word) {
  Fd fd(memfd_create("test", MFD_CLOEXEC));
  CHECK(write(fd.get(), word.data(), word.size()) == static_cast<ssize_t>(word.size()));
  return fd;
}

std::string wordIn(const Fd& fd) {
  char word[64] = {};
  CHECK(pread(fd.get(), word, sizeof word - 1, 0) >= 0);
  return word;
}

void everybodyGetsEverybodys(Group& group) {
  const auto word = [](int r) { return "of rank " + std::to_string(r); };
  const Fd mine = holding(word(group.rank()));
  const std::vector<Fd> fds = exchangeFds(group, mine.get(), "words");
  CHECK_EQ(fds.size(), static_cast<size_t>(group.size()));
  for (int r = 0; r < group.size(); ++r) {
    const Fd& fd = fds[static_cast<size_t>(r)];
    CHECK_EQ(static_cast<bool>(fd), r != group.rank());
    if (fd) CHECK_EQ(wordIn(fd), word(r));
    if (fd) CHECK(fcntl(fd.get(), F_GETFD) & FD_CLOEXEC);
  }
}

size_t openFds() {
  size_t n = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    (void)entry;
    ++n;
  }
  return n;
}

// Rank 1 of 2, played by hand: what it and rank 0 tell each other before sockets are used.
struct ByHand {
  struct Invitation {
    char socket[96], secret[72];
  };
  explicit ByHand(Group& group) {
    agreeOnStatus(group, [] {});
    Invitation mine{};
    setText(mine.secret, "mine");
    theirs = gatherEach(group, mine)[0];
  }
  // Connects to rank 0 and says that.
  Fd say(const char* rank, const char* fds, const std::vector<int>& gifts) const {
    Fd socket = connectTo(theirs.socket);
    // False where it was turned away already.
    sendPacket(socket, std::string("secret=") + theirs.secret + "\nrank=" + rank + "\nfds=" + fds,
               gifts);
    return socket;
  }
  Invitation theirs;
};

// What the exchange does with the group before its sockets are used: the calls of a rank that then
// goes no further.
void comeAsFarAsTheSockets(Group& group) {
  agreeOnStatus(group, [] {});
  gatherEach(group, std::array<char, 168>{});
}

}  // namespace

// ---- processes, which are forked before this one has had any thread

TEST(processes_get_each_others_descriptors) {
  for (int P : {2, 3, 5})
    processes::inGroup(P, [](Group& group) {
      for (int again = 0; again < 5; ++again) everybodyGetsEverybodys(group);
    });
}

TEST(a_rank_that_is_killed_ends_the_exchange_for_all) {
  for (int doomed : {0, 1, 2})
    for (bool before : {true, false})
      processes::inGroup(3,
                         [&](Group& group) {
                           if (group.rank() == doomed) {
                             if (!before) comeAsFarAsTheSockets(group);
                             raise(SIGKILL);
                           }
                           const Fd mine = holding("x");
                           const auto exchange = [&] { exchangeFds(group, mine.get(), "words"); };
                           CHECK(failureOf(exchange, "rank " + std::to_string(doomed) + " (pid") ==
                                 Failure::kPeerLost);
                           CHECK(failureOf(exchange, "its process ended") == Failure::kPeerLost);
                         },
                         {}, {doomed});
}

// UBSan itself needs descriptors to tell what an object is.
#ifndef __SANITIZE_ADDRESS__
TEST(a_rank_without_descriptors_left_ends_it_for_all_with_its_reason) {
  processes::inGroup(3, [](Group& group) {
    const Fd mine = holding("x");
    if (group.rank() == 1) {
      const rlimit none{.rlim_cur = openFds(), .rlim_max = openFds()};
      CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
    }
    const auto exchange = [&] { exchangeFds(group, mine.get(), "words"); };
    CHECK(failureOf(exchange, "rank 1 (pid") == Failure::kSetup);
  });
}
#endif

TEST(memory_of_a_rank_that_died_stays_readable) {
  processes::inGroup(3,
                     [](Group& group) {
                       HostPages pages(group, 100);
                       std::memset(pages.at(group.rank()), 'a' + group.rank(), pages.bytes());
                       group.run({Barrier{}});
                       if (group.rank() == 1) raise(SIGKILL);
                       while (!group.epoch()->peers().states()[1].isLost()) sleepMs(1);
                       for (int r = 0; r < 3; ++r)
                         for (size_t i = 0; i < pages.bytes(); ++i)
                           CHECK(pages.at(r)[i] == static_cast<std::byte>('a' + r));
                     },
                     {}, {1});
}

TEST(another_user_is_not_listened_to) {
  if (geteuid() != 0) {
    std::printf("skipped: needs root, to be another user\n");
    return;
  }
  processes::inGroup(2,
                     [](Group& group) {
                       if (group.rank() == 0) {
                         CHECK(failureOf([&] { exchangeFds(group, -1, "words"); }, "rank 1") ==
                               Failure::kPeerLost);
                         return;
                       }
                       // Knows everything that rank 1 knows.
                       const ByHand rank_1(group);
                       CHECK(setuid(65534) == 0);
                       const Fd socket = rank_1.say("1", "0", {});
                       Packet packet;
                       while (receivePacket(socket, packet) == Received::kNothingYet) sleepMs(1);
                       CHECK(packet.bytes.empty());
                       raise(SIGKILL);
                     },
                     {}, {1});
}

// ---- threads

TEST(threads_get_each_others_descriptors) {
  for (int P : {1, 2, 4, 8})
    ranks::inGroup(P, [](Group& group) {
      for (int again = 0; again < 5; ++again) everybodyGetsEverybodys(group);
    });
}

TEST(who_gives_none_still_gets_all) {
  ranks::inGroup(4, [](Group& group) {
    const Fd mine = group.rank() % 2 == 0 ? holding(std::to_string(group.rank())) : Fd();
    const std::vector<Fd> fds = exchangeFds(group, mine.get(), "words");
    for (int r = 0; r < 4; ++r) {
      const Fd& fd = fds[static_cast<size_t>(r)];
      CHECK_EQ(static_cast<bool>(fd), r % 2 == 0 && r != group.rank());
      if (fd) CHECK_EQ(wordIn(fd), std::to_string(r));
    }
  });
}

TEST(nothing_stays_open) {
  everybodyGetsEverybodys(*[] {
    static ranks::MemoryStore store;
    return Group::create(store, 0, 1, {.name = "test"});
  }());
  const size_t before = openFds();
  ranks::inGroup(3, everybodyGetsEverybodys);
  ranks::inGroup(3, [](Group& group) { HostPages(group, 5000); });
  CHECK_EQ(openFds(), before);
}

TEST(strangers_are_dropped) {
  const Fd gift = holding("poison"), true_gift = holding("of rank 1");
  // Rank 1 is played by hand, and late: strangers call at rank 0 before it.
  const auto strangersCall = [&](const std::string& name) {
    const std::string oddities[] = {"garbage", std::string(3000, '\0'), "rank=1\nfds=1\nsecret=\n",
                                    "rank=1\nfds=1\nsecret=" + std::string(64, 'a') + "\n",
                                    "rank=-1\nfds=1\n"};
    for (const std::string& oddity : oddities)
      for (const std::vector<int>& gifts : {std::vector<int>{}, {gift.get()}, {gift.get(), 1, 2}}) {
        const Fd socket = connectTo(name);
        CHECK(socket && sendPacket(socket, oddity, gifts));
        Packet packet;
        while (receivePacket(socket, packet) == Received::kNothingYet) sleepMs(1);
        CHECK(packet.bytes.empty());
      }
  };
  ranks::inGroup(2, [&](Group& group) {
    if (group.rank() == 0) {
      const std::vector<Fd> fds = exchangeFds(group, -1, "words");
      CHECK_EQ(wordIn(fds[1]), "of rank 1");
      return;
    }
    const ByHand rank_1(group);
    const Fd silent = connectTo(rank_1.theirs.socket);
    strangersCall(rank_1.theirs.socket);
    // Who knows the secret but does not keep to the rules is no better.
    for (const char* rank : {"0", "2", "-1", "x"}) rank_1.say(rank, "1", {gift.get()});
    rank_1.say("1", "0", {gift.get()});
    rank_1.say("1", "2", {gift.get(), gift.get()});
    rank_1.say("1", "1", {});
    const Fd good = rank_1.say("1", "1", {true_gift.get()});
    Packet answer;
    while (receivePacket(good, answer) == Received::kNothingYet) sleepMs(1);
    CHECK_EQ(answer.bytes, "fds=0\nrank=0\nsecret=mine\n");
    group.run({Barrier{}});
  });
}

TEST(who_does_not_take_part_is_named_at_the_deadline) {
  ranks::inGroup(
      3,
      [](Group& group) {
        if (group.rank() == 1) {
          comeAsFarAsTheSockets(group);
          waitForFailure(group);
          CHECK(failureOf([&] { group.checkHealth(); }, "rank 1 (") == Failure::kTimeout);
          return;
        }
        CHECK(failureOf([&] { exchangeFds(group, -1, "words"); },
                        "did not take part within 2 s while ranks exchanged descriptors of "
                        "words") == Failure::kTimeout);
      },
      {.name = "test", .timeout = 2 * kSecond});
}

TEST(who_has_left_is_lost) {
  ranks::inGroup(3, [](Group& group) {
    if (group.rank() == 2) return comeAsFarAsTheSockets(group);
    CHECK(failureOf([&] { exchangeFds(group, -1, "words"); }, "rank 2") == Failure::kPeerLost);
  });
}

TEST(ctrl_c_ends_the_exchange_for_all) {
  static thread_local bool is_rank_0 = false;
  static std::atomic<bool> pressed;
  pressed = false;
  struct CtrlC {};
  GroupOptions options{.name = "test"};
  options.interrupt = [] {
    if (is_rank_0 && pressed) throw CtrlC();
  };
  ranks::inGroup(
      3,
      [](Group& group) {
        if (group.rank() == 2) {
          comeAsFarAsTheSockets(group);
          sleepMs(100);  // most likely the others wait for this rank by now
          pressed = true;
          waitForFailure(group);
          return;
        }
        if (group.rank() == 1) {
          CHECK(failureOf([&] { exchangeFds(group, -1, "words"); }, "interrupted while ranks") ==
                Failure::kAborted);
          return;
        }
        bool thrown = false;
        is_rank_0 = true;
        try {
          exchangeFds(group, -1, "words");
        } catch (const CtrlC&) {
          thrown = true;
        }
        CHECK(thrown && group.failed());
      },
      options);
}

TEST(an_error_of_one_rank_is_everybodys_and_the_group_goes_on) {
  ranks::inGroup(4, [](Group& group) {
    const auto step = [&] {
      if (group.rank() >= 2)
        throw Error(Failure::kSetup, "no luck for " + std::to_string(group.rank()));
    };
    CHECK(failureOf([&] { agreeOnStatus(group, step); }, "): no luck for 2") == Failure::kSetup);
    agreeOnStatus(group, [] {});
    struct Numbers {
      int rank;
      char text[8];
    } mine{.rank = group.rank(), .text = {}};
    setText(mine.text, "much too long");
    const auto all = gatherEach(group, mine);
    for (int r = 0; r < 4; ++r) CHECK_EQ(all[static_cast<size_t>(r)].rank, r);
    CHECK_EQ(std::string(all[3].text), "much to");
  });
}

TEST(host_pages_are_the_same_for_all) {
  for (int P : {1, 2, 5})
    ranks::inGroup(P, [&](Group& group) {
      HostPages pages(group, 4097);
      CHECK_EQ(pages.bytes(), 8192u);
      for (size_t i = 0; i < pages.bytes(); ++i) CHECK(pages.at(group.rank())[i] == std::byte{0});
      std::memcpy(pages.at(group.rank()) + 4096, &P, sizeof P);
      group.run({Barrier{}});
      for (int r = 0; r < P; ++r) {
        int word = 0;
        std::memcpy(&word, pages.at(r) + 4096, sizeof word);
        CHECK_EQ(word, P);
      }
      group.run({Barrier{}});
    });
  std::array<std::atomic<std::byte*>, 3> places{};
  ranks::inGroup(3, [&](Group& group) {
    HostPages pages(group, 1);
    places[static_cast<size_t>(group.rank())] = pages.at(group.rank());
    group.run({Barrier{}});
    for (int r = 0; r < 3; ++r) CHECK(pages.at(r) == places[static_cast<size_t>(r)]);
    group.run({Barrier{}});
  });
}

TEST(host_pages_of_different_sizes_are_refused_on_all_ranks) {
  ranks::inGroup(3, [](Group& group) {
    CHECK(failureOf([&] { HostPages(group, group.rank() == 1 ? 9000 : 100); }, "were agreed") ==
          Failure::kSetup);
    HostPages(group, 100);
  });
}
