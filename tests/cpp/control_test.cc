// The control ring: what one says all hear, whoever leaves, ends, or is cut off.
#include "control/control.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "control/control_frames.h"
#include "control_world.h"
#include "sockets.h"

using namespace ringreduce;
using namespace control_world;

TEST(a_failure_reaches_everybody_once) {
  for (const Over over : {Over::kUnix, Over::kIpv4, Over::kIpv6})
    for (const int size : {1, 2, 3, 5, 64}) {
      Ranks ranks(size, over);
      const int reporter = size / 2;
      ranks[reporter].broadcastFailure(failure(reporter, std::string(4000, 'x')));
      ranks[reporter].broadcastFailure(failure(reporter, "a second one"));
      for (int r = 0; r < size; ++r) {
        if (r == reporter) continue;
        until([&] { return ranks.at(r).locked([&] { return ranks.at(r).failures.size(); }) == 1; },
              "a failure at every rank");
        const GroupFailure& heard = ranks.at(r).failures[0];
        CHECK(heard.kind == Failure::kTimeout);
        CHECK_EQ(heard.culprit, reporter);
        CHECK_EQ(heard.text, std::string(4000, 'x'));
      }
      CHECK(ranks[reporter].flush(20 * kSecond));
      for (int r = 0; r < size; ++r) ranks.end(r);
      CHECK(ranks.at(reporter).failures.empty());
      ranks.nobodyIsLost();
    }
}

TEST(of_two_failures_everybody_hears_one) {
  for (int size = 2; size < 12; ++size) {
    Ranks ranks(size);
    ranks[0].broadcastFailure(failure(0));
    ranks[size / 2].broadcastFailure(failure(size / 2));
    for (int r = 0; r < size; ++r)
      if (r != 0 && r != size / 2)
        until([&] { return ranks.at(r).locked([&] { return ranks.at(r).failures.size(); }) == 1; },
              "one of two failures at every rank");
    // Who tells one and closes has told it, and takes nobody's word away.
    for (int r = 0; r < size; ++r) CHECK(ranks[r].flush(20 * kSecond));
    for (int r = 0; r < size; ++r) ranks.end(r);
    ranks.nobodyIsLost();
  }
}

TEST(who_reports_and_closes_is_not_taken_for_dead) {
  for (int round = 0; round < 10; ++round) {
    Ranks ranks(5, round % 2 ? Over::kIpv4 : Over::kUnix);
    ranks[2].broadcastFailure(failure(2, std::string(8000, 'y')));
    CHECK(ranks[2].flush(20 * kSecond));
    ranks.end(2);
    for (int r : {0, 1, 3, 4})
      until([&] { return ranks.at(r).locked([&] { return !ranks.at(r).failures.empty(); }); },
            "the last word of a rank");
    ranks.nobodyIsLost();
  }
}

TEST(a_process_that_ends_is_told_to_all) {
  for (const Over over : {Over::kUnix, Over::kIpv4, Over::kIpv6})
    for (const int size : {2, 3, 4, 7, 64}) {
      Ranks ranks(size, over);
      const int dead = size - 1;
      ranks.end(dead);
      for (int r = 0; r < dead; ++r) {
        until([&] { return !ranks.at(r).lostRanks().empty(); }, "a lost rank");
        CHECK_EQ(ranks.at(r).lostRanks().size(), size_t{1});
        CHECK_EQ(ranks.at(r).lost_ranks[dead], std::string(kEnded));
      }
    }
}

TEST(all_hear_of_all_processes_that_end_one_after_the_other) {
  std::mt19937 random(3);
  for (int round = 0; round < 12; ++round) {
    const int size = 4 + static_cast<int>(random() % 9);
    Ranks ranks(size, round % 2 ? Over::kIpv4 : Over::kUnix);
    std::vector<int> order(static_cast<size_t>(size));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    const auto dead = static_cast<size_t>(size) / 2;
    for (size_t i = 0; i < dead; ++i) {
      ranks.end(order[i]);
      if (random() % 2) sleepFor(static_cast<int>(random() % 3000));
    }
    for (size_t i = dead; i < order.size(); ++i)
      until([&] { return ranks.at(order[i]).lostRanks().size() >= dead; }, "all that ended");
    // The gaps are closed: a word still gets to all that are left.
    const int teller = order[dead];
    ranks[teller].broadcastFailure(failure(teller));
    for (size_t i = dead + 1; i < order.size(); ++i) {
      Heard& heard = ranks.at(order[i]);
      until([&] { return heard.locked([&] { return heard.failures.size(); }) == 1; },
            "a failure across gaps");
      CHECK_EQ(heard.lostRanks().size(), dead);
    }
  }
}

TEST(a_stretch_of_the_ring_that_ends_at_once_is_lost_to_the_last) {
  for (const Over over : {Over::kUnix, Over::kIpv4}) {
    Ranks ranks(9, over);
    // Whoever stood beside the middle ones is gone as well.
    for (int r : {5, 2, 4, 3, 6}) ranks.end(r);
    for (int r : {0, 1, 7, 8})
      until([&] { return ranks.at(r).lostRanks() == (std::vector<int>{2, 3, 4, 5, 6}); },
            "the last of a stretch");
  }
}

TEST(ranks_leave_in_any_order_and_the_rest_still_hear_each_other) {
  std::mt19937 random(4);
  for (int round = 0; round < 24; ++round) {
    const int size = 2 + static_cast<int>(random() % 9);
    Ranks ranks(size, round % 3 ? Over::kUnix : Over::kIpv4);
    std::vector<int> order(static_cast<size_t>(size));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    const auto staying = 1 + random() % (order.size() - 1);
    const bool at_once = random() % 2;
    std::vector<std::thread> leavers;
    for (size_t i = staying; i < order.size(); ++i) {
      const int pause = at_once ? 0 : static_cast<int>(random() % 2000);
      leavers.emplace_back([&ranks, r = order[i], pause] {
        sleepFor(pause);
        ranks.leave(r);
      });
      if (random() % 3 == 0) leavers.back().join();
    }
    for (std::thread& leaver : leavers)
      if (leaver.joinable()) leaver.join();
    for (size_t i = 0; i < staying; ++i)
      until([&] { return ranks.at(order[i]).gone() == order.size() - staying; },
            "every departure at every rank that stays");
    ranks[order[0]].broadcastFailure(failure(order[0]));
    for (size_t i = 1; i < staying; ++i) {
      Heard& heard = ranks.at(order[i]);
      until([&] { return heard.locked([&] { return heard.failures.size(); }) == 1; },
            "a failure among those that stay");
    }
    for (int r = 0; r < size; ++r)
      if (ranks.controls[static_cast<size_t>(r)]) CHECK(ranks[r].flush(20 * kSecond));
    for (int r = 0; r < size; ++r) ranks.end(r);
    ranks.nobodyIsLost();
  }
}

TEST(all_leave_at_nearly_the_same_time) {
  std::mt19937 random(5);
  for (const int size : {1, 2, 3, 8, 64})
    for (int round = 0; round < (size == 64 ? 2 : 6); ++round) {
      Ranks ranks(size, round % 2 ? Over::kIpv4 : Over::kUnix);
      std::vector<std::thread> leavers;
      const int spread = round % 3 == 0 ? 1 : 4000;
      for (int r = 0; r < size; ++r)
        leavers.emplace_back([&ranks, r, pause = static_cast<int>(random()) % spread] {
          sleepFor(std::abs(pause));
          ranks.leave(r);
        });
      for (std::thread& leaver : leavers) leaver.join();
      ranks.nobodyIsLost();
    }
}

TEST(who_leaves_without_waiting_is_still_known_to_have_left) {
  for (int round = 0; round < 10; ++round) {
    Ranks ranks(6);
    for (int r : {1, 3, 4}) ranks[r].depart(Declared::kGone);
    for (int r : {1, 3, 4}) {
      ranks[r].flush(2 * kMillisecond);
      ranks.end(r);
    }
    for (int r : {0, 2, 5})
      until([&] { return ranks.at(r).gone() == 3; }, "departures that nobody waited for");
    ranks.nobodyIsLost();
  }
}

TEST(a_rank_ends_while_others_leave) {
  for (int round = 0; round < 10; ++round) {
    Ranks ranks(7);
    std::thread leaver([&] { ranks.leave(2, kSecond); });
    std::thread other([&] { ranks.leave(5, kSecond); });
    sleepFor(round * 100);
    ranks.end(3);
    leaver.join();
    other.join();
    for (int r : {0, 1, 4, 6}) {
      until([&] { return ranks.at(r).gone() == 2 && ranks.at(r).lostRanks().size() == 1; },
            "two departures and a death");
      CHECK(ranks.at(r).lost_ranks.contains(3));
    }
  }
}

TEST(a_connection_that_cannot_be_watched_does_not_stand_for_one) {
  Heard heard;
  auto [next, theirs] = sockets::pair(Over::kUnix);
  auto [previous, others] = sockets::pair(Over::kUnix);
  std::atomic<int> dialled{0};
  auto control = Control::start(
      Reactor::shared(), 0, 4, std::move(next), std::move(previous),
      [&](int to, int, const std::function<void()>&) -> Fd {
        if (to == 2) ++dialled;
        // The first time it is no better: one that cannot be watched.
        if (dialled == 1) return Fd(open("/dev/null", O_RDWR | O_CLOEXEC));
        throw std::runtime_error("nobody is there");
      },
      heard, Ranks::quick());
  control->accept(2, Fd(open("/dev/null", O_RDWR | O_CLOEXEC)));
  // Rank 1 leaves: rank 2 is next, and there is no way to it yet.
  const std::string left = net::encode(net::Departed{1, Declared::kGone});
  CHECK(send(theirs.get(), left.data(), left.size(), 0) == static_cast<ssize_t>(left.size()));
  until([&] { return dialled >= 2; }, "dials to the one beyond");
  control.reset();
}

TEST(two_cuts_part_the_ring_and_each_side_names_the_other) {
  for (const bool late : {false, true}) {
    Control::Options options = Ranks::quick();
    if (late) options.heartbeat = kSecond;  // so that nothing here is late by that much
    Ranks ranks(6, Over::kUnix, options, {0, 2, 4, 1, 3, 5});
    if (late) {
      ranks.cut(2, 4);
      sleepFor(50'000);
      ranks.cut(3, 5);
    } else {
      Reactor::shared()->run([&] {  // no rank notices one cut before the other
        ranks.cut(2, 4);
        ranks.cut(3, 5);
      });
    }
    for (int r = 0; r < 6; ++r)
      until([&] { return !ranks.at(r).lostRanks().empty(); }, "a partition");
    for (int r : {5, 0, 2}) CHECK(ranks.at(r).lostRanks() == (std::vector<int>{1, 3, 4}));
    for (int r : {4, 1, 3}) CHECK(ranks.at(r).lostRanks() == (std::vector<int>{0, 2, 5}));
    for (int r = 0; r < 6; ++r) CHECK_EQ(ranks.at(r).lost_calls, 1);
    CHECK_EQ(ranks.at(0).lost_ranks[1], std::string("no packet from their hosts came for 0.2 s"));
    for (int r = 0; r < 6; ++r) ranks.end(r);
    ranks.mendCables();
  }
}

TEST(a_host_that_is_gone_is_named_by_all) {
  Ranks ranks(5, Over::kUnix, {.heartbeat = 20 * kMillisecond, .lost_after = kSecond, .ring = {}});
  ranks.cut(1, 2);
  ranks.cut(2, 3);
  for (int r : {0, 1, 3, 4}) {
    until([&] { return !ranks.at(r).lostRanks().empty(); }, "a host that is gone");
    CHECK(ranks.at(r).lostRanks() == std::vector<int>{2});
    CHECK_EQ(ranks.at(r).lost_ranks[2], std::string("no packet from its host came for 1 s"));
  }
  for (int r = 0; r < 5; ++r) ranks.end(r);
  ranks.mendCables();
}

TEST(of_one_cut_alone_its_two_ends_speak) {
  Ranks ranks(5);
  ranks.cut(1, 2);
  until([&] { return ranks.at(1).lostRanks() == std::vector<int>{2}; }, "the rank across a cut");
  until([&] { return ranks.at(2).lostRanks() == std::vector<int>{1}; }, "the rank across a cut");
  ranks[1].broadcastFailure(failure(1));
  for (int r : {0, 3, 4}) {
    until([&] { return ranks.at(r).locked([&] { return ranks.at(r).failures.size(); }) == 1; },
          "the other way round");
    CHECK(ranks.at(r).lostRanks().empty());
  }
  for (int r = 0; r < 5; ++r) ranks.end(r);
  ranks.mendCables();
}

TEST(two_ranks_that_are_cut_name_each_other) {
  Ranks ranks(2, Over::kIpv4);
  ranks.cut(0, 1);
  for (int r : {0, 1})
    until([&] { return ranks.at(r).lostRanks() == std::vector<int>{1 - r}; }, "the other rank");
  for (int r : {0, 1}) ranks.end(r);
  ranks.mendCables();
}

TEST(a_stopped_process_is_not_lost_and_a_killed_one_is) {
  auto [next, next_end] = sockets::pair(Over::kIpv4);
  auto [previous, previous_end] = sockets::pair(Over::kIpv6);
  const int ends[] = {dup(next_end.get()), dup(previous_end.get())};  // which a child keeps
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0)
    for (;;) pause();
  for (int fd : ends) close(fd);
  next_end.reset();
  previous_end.reset();
  kill(child, SIGSTOP);
  Heard heard;
  const auto control = Control::start(Reactor::shared(), 0, 2, std::move(next), std::move(previous),
                                      dialNobody, heard, Ranks::quick());
  // Longer than lost_after, and than heartbeats go on.
  sleepFor(1'600'000);
  control->askForProgress();
  CHECK(heard.lostRanks().empty());
  CHECK(heard.whereabouts.empty());
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  until([&] { return heard.lostRanks() == std::vector<int>{1}; }, "a killed process");
  CHECK_EQ(heard.lost_ranks[1], std::string(kEnded));
}

TEST(whoever_listens_may_end_it_within_a_call) {
  struct Ends final : Heard {
    void onPeersLost(const std::vector<int>& ranks, Observed observed,
                     const std::string& how) override {
      Heard::onPeersLost(ranks, observed, how);
      control.reset();
      done = true;
    }
    std::unique_ptr<Control> control;
    std::atomic<bool> done{false};
  } heard;
  auto [next, next_end] = sockets::pair(Over::kUnix);
  auto [previous, previous_end] = sockets::pair(Over::kUnix);
  auto reactor = Reactor::shared();
  heard.control = Control::start(reactor, 0, 3, std::move(next), std::move(previous), dialNobody,
                                 heard, Ranks::quick());
  reactor.reset();  // the group's is the last
  next_end.reset();
  until([&] { return heard.done.load(); }, "the end of a group within a call");
}
