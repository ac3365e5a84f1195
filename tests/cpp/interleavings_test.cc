// The two methods of interleavings.h themselves, on programs small enough to see the answer.
#include "interleavings.h"

#include "interleavings_check.h"

using namespace interleavings;

TEST(lanes_apart_have_as_many_states_as_there_are_positions) {
  Program apart;
  for (int l = 0; l < 3; ++l) {
    auto& lane = apart.lanes.emplace_back();
    for (uint64_t n = 1; n <= 9; ++n) lane.push_back(publishes(static_cast<size_t>(l), n));
  }
  CHECK_EQ(explore(apart).states, 1000u);
  CHECK(order(apart).proven());
}

TEST(a_message_is_in_order_if_it_is_waited_for_and_both_ends_say_so) {
  const auto passes = [](bool release, bool acquire) {
    return Program{{{writes(0), publishes(8, 1, release)}, {waits(8, 1, acquire), reads(0)}}, {}};
  };
  CHECK(order(passes(true, true)).proven());
  CHECK(!order(passes(false, true)).proven());
  CHECK(!order(passes(true, false)).proven());
  CHECK_EQ(explore(passes(true, true)).states, 5u);
  CHECK(explore(passes(false, false)).fine());  // blind to orders

  const Program unwaited{{{writes(0, 4), publishes(8, 1)}, {reads(3)}}, {}};
  CHECK_EQ(order(unwaited).races.size(), 1u);
  CHECK(explore(unwaited).race);
  const Program apart{{{writes(0, 4)}, {writes(4, 4)}}, {}};
  CHECK(order(apart).proven());
  CHECK(explore(apart).fine());
  const Program both_read{{{reads(0)}, {reads(0)}}, {}};
  CHECK(order(both_read).proven());
  CHECK(explore(both_read).fine());
}

TEST(a_release_covers_what_others_of_the_block_wrote_before_the_barrier) {
  // Lanes 0 and 1 write, lane 1 speaks for both; lane 2 listens for 3 as well.
  const auto blocks = [](bool first, bool second) {
    Program p{{{writes(0)}, {writes(1)}, {waits(8, 1)}, {}}, {{0, 1}, {2, 3}}};
    if (first)
      for (size_t l : {0, 1}) p.lanes[l].push_back(on(Do::kBarrier, 0));
    p.lanes[1].push_back(publishes(8, 1));
    if (second)
      for (size_t l : {2, 3}) p.lanes[l].push_back(on(Do::kBarrier, 1));
    p.lanes[3].push_back(reads(0, 2));
    return p;
  };
  holds("two blocks of two lanes", blocks(true, true));
  races("the first without its barrier", blocks(false, true));
  races("the second without its barrier", blocks(true, false));
}

TEST(what_never_comes_is_a_deadlock) {
  const Program never{{{waits(8, 2)}, {publishes(8, 1)}}, {}};
  const Program crossed{{{waits(8, 1), publishes(9, 1)}, {waits(9, 1), publishes(8, 1)}}, {}};
  const Program alone{{{on(Do::kBarrier, 0)}, {}}, {{0, 1}}};
  for (const Program& program : {never, crossed, alone}) {
    CHECK(!order(program).wrong.empty());
    CHECK(explore(program).deadlock);
  }
}

TEST(a_word_is_set_and_taken_in_turn) {
  const auto turns = [](bool takes, bool answers) {
    Program p{{{}, {}}, {}};
    for (uint64_t n = 1; n <= 2; ++n) {
      p.lanes[0].insert(p.lanes[0].end(), {writes(0), on(Do::kSet, 1)});
      p.lanes[1].push_back(on(Do::kAwait, 1));
      if (takes) p.lanes[1].push_back(on(Do::kTake, 1));
      p.lanes[1].push_back(reads(0));
      if (answers) p.lanes[1].push_back(publishes(8, n));
      if (answers) p.lanes[0].push_back(waits(8, n));
    }
    return p;
  };
  holds("a word, set and taken twice", turns(true, true));
  CHECK(explore(turns(false, true)).lost_signal);
  CHECK(!order(turns(false, true)).wrong.empty());
  CHECK(explore(turns(true, false)).lost_signal);
  CHECK(!order(turns(true, false)).proven());
}
