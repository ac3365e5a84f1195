// The control ring: who is asked how far it is, what is answered, and what of it is not believed.

#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "control/control.h"
#include "control/control_frames.h"
#include "control_world.h"
#include "sockets.h"
#include "transport/shm/page.h"

using namespace ringreduce;
using namespace control_world;

TEST(everybody_is_asked_and_answers) {
  for (const int size : {1, 2, 5, 64}) {
    Ranks ranks(size);
    for (int r = 0; r < size; ++r) {
      Announcement last;
      last.sequence = static_cast<uint64_t>(r) << 40;
      last.root = -1;
      ranks.at(r).locked([&] {
        ranks.at(r).mine = {
            .announced = static_cast<uint64_t>(r) + 1, .last = last, .waits_for = r - 1};
        if (r == 0 && size > 2) ranks.at(r).stopped_here = {size - 1};
        return 0;
      });
    }
    ranks[0].askForProgress();
    ranks[0].askForProgress();
    for (int listener = 0; listener < size; ++listener)
      for (int r = 0; r < size; ++r) {  // who asks answers too
        if (listener == r) continue;
        const auto there = [&] {
          return ranks.at(listener).locked([&] { return ranks.at(listener).whereabouts[r]; });
        };
        until([&] { return there().announced == static_cast<uint64_t>(r) + 1; }, "an answer");
        CHECK_EQ(there().last.sequence, static_cast<uint64_t>(r) << 40);
        CHECK_EQ(there().last.root, -1);
        CHECK_EQ(there().waits_for, r - 1);
      }
    if (size > 2) {
      // What rank 0 says of a neighbour comes with its own answer, when another asks.
      sleepFor(25'000);
      ranks[1].askForProgress();
      until(
          [&] {
            return ranks.at(1).locked([&] { return ranks.at(1).seen_stopped.contains(size - 1); });
          },
          "a stopped rank");
    }
  }
}

TEST(who_asks_for_more_is_told_however_soon_it_is_after_another_question) {
  Ranks ranks(3);
  const auto announce = [&](uint64_t announced) {
    for (int r = 0; r < 3; ++r)
      ranks.at(r).locked([&] {
        Progress& mine = ranks.at(r).mine;
        mine = {.announced = announced, .last = {{.sequence = announced - 1}}};
        for (uint64_t s = 0; s + 1 < announced; ++s) mine.earlier.push_back({{.sequence = s}});
        return 0;
      });
  };
  const auto told = [&](uint64_t announced, uint64_t since) {
    ranks[0].askForProgress(since);
    for (int r : {1, 2})
      until(
          [&] {
            return ranks.at(0).locked([&] {
              const Progress& there = ranks.at(0).whereabouts[r];
              return there.announced == announced &&
                     there.earlier.size() == announced - 1 - since &&
                     (there.earlier.empty() || there.earlier[0].sequence == since);
            });
          },
          "what was announced earlier");
  };
  announce(5);
  ranks[0].askForProgress();
  told(5, 3);
  told(5, 1);
  announce(6);
  told(6, 1);
  announce(kAnnouncements);
  told(kAnnouncements, 0);
}

TEST(an_answer_that_no_rank_gives_is_not_believed) {
  const auto isBelieved = [](const OpSignature& last) {
    size_t believed = 0;
    for (const bool in_stream : {false, true}) {
      net::Answer answer;
      answer.rank = 1;
      (in_stream ? answer.there.streams.oldest : static_cast<OpSignature&>(answer.there.last)) =
          last;
      answer.there.streams.begun = in_stream;
      const std::string bytes = net::encode(answer);
      net::ControlReader reader(4);
      reader.feed(std::as_bytes(std::span(bytes)));
      const auto frame = reader.next();
      CHECK(frame.has_value() == !reader.failed());
      believed += frame && std::get<net::Answer>(*frame) == answer;
    }
    CHECK(believed != 1);
    return believed == 2;
  };
  CHECK(isBelieved({}));
  CHECK(isBelieved({.kind = Kind::kReduce, .dtype = DType::kBFloat16, .op = 8, .root = 3}));
  CHECK(!isBelieved({.kind = static_cast<Kind>(kKindTable.size())}));
  CHECK(!isBelieved({.dtype = static_cast<DType>(kDTypes.size())}));
  CHECK(!isBelieved({.op = kReduceOps}));
  CHECK(!isBelieved({.root = 4}));
  CHECK(!isBelieved({.root = -2}));
}

TEST(what_no_rank_sends_ends_a_connection_and_nothing_else) {
  Heard heard;
  auto [next, next_end] = sockets::pair(Over::kIpv4);
  auto [previous, previous_end] = sockets::pair(Over::kIpv4);
  const auto control = Control::start(Reactor::shared(), 0, 3, std::move(next), std::move(previous),
                                      dialNobody, heard, Ranks::quick());
  const char nonsense[] = "GET / HTTP/1.1\r\n\r\n";
  CHECK(::send(next_end.get(), nonsense, sizeof nonsense, 0) > 0);
  until([&] { return heard.lostRanks() == std::vector<int>{1}; }, "a rank that talks nonsense");
  CHECK_EQ(heard.lost_ranks[1], std::string("its control connection carried what no rank sends"));
}
