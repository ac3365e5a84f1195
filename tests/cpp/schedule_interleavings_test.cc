// The direct schedule in every interleaving (interleavings.h): the lists that the ranks' streams
// run (direct_schedule.h), several calls in a row, lose no signal, race for no byte and never get
// stuck; lists with a mistake in them do.
#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "cuda/kernels/direct_schedule.h"
#include "interleavings_check.h"

using namespace interleavings;
using namespace ringreduce;
using namespace ringreduce::cuda;
using What = ScheduleStep::Do;
using List = std::vector<ScheduleStep>;
using Mistake = std::function<void(List&)>;

namespace {

struct Direct {
  int ranks;
  int calls;
  bool shared;
  bool staged;
  uint64_t first = 0;  // number of the first call
  bool in_place = false;
  bool alternates = false;  // `shared` and `staged`, with the calls
  // Calls where each rank leads for itself, by turns: kEverybody gives something, or this root.
  std::vector<int> own = {};
};
constexpr int kAllReduces = -2;  // in `own`

// Each rank has memory that its peers map, an input and an output.
constexpr size_t kCount = 1000;
enum class Buffer : uint8_t { kMapped, kInput, kOutput };
Range at(int rank, Buffer buffer, Span elements = {0, kCount}) {
  const size_t begin = (static_cast<size_t>(rank) * 3 + static_cast<size_t>(buffer)) * kCount;
  return {begin + elements.begin, begin + elements.end()};
}
Step moves(Range from, Range to) {
  return {.what = Do::kAccess, .reads = {from}, .writes = {to}};
}

void add(std::vector<Step>& lane, const Direct& d, int rank, int i, const Mistake& mistake) {
  const bool shared = d.shared != (d.alternates && i % 2);
  const bool staged = d.staged != (d.alternates && i / 2 % 2);
  const Buffer mine = d.in_place ? Buffer::kInput : Buffer::kOutput;
  // Leaders may write the sums where the addends were, which is the harder case.
  const Buffer from = staged ? Buffer::kMapped : Buffer::kInput;
  const Buffer to = staged ? Buffer::kMapped : mine;
  const int root = d.own.empty() ? kAllReduces : d.own[static_cast<size_t>(i) % d.own.size()];
  List list = root == kAllReduces
                  ? directSchedule(rank, d.ranks, kCount, d.first + static_cast<uint64_t>(i),
                                   shared, staged)
                  : ownSchedule(rank, d.ranks, root);
  mistake(list);
  // The user's kernels in the same stream write the input first and read the output last.
  then(lane, {.what = Do::kAccess, .writes = {at(rank, Buffer::kInput)}});
  for (const ScheduleStep& step : list) {
    const size_t pair = static_cast<size_t>(step.leader * d.ranks + step.rank);
    const size_t word = 2 * pair + static_cast<size_t>(step.word);
    switch (step.what) {
      case What::kBegin:
        break;
      case What::kStage:
        then(lane, moves(at(rank, Buffer::kInput), at(rank, Buffer::kMapped)));
        break;
      case What::kSet:
        then(lane, on(Do::kSet, word));
        break;
      case What::kAwait:
        then(lane, on(Do::kAwait, word));
        break;
      case What::kTake:
        then(lane, on(Do::kTake, word));
        break;
      case What::kLead:
        for (int r = 0; root != kAllReduces && r < d.ranks; ++r)
          if (root == kEverybody || r == root)
            then(lane, moves(at(r, Buffer::kMapped), at(rank, mine)));
        for (int r = 0; root == kAllReduces && r < d.ranks; ++r)
          then(lane, moves(at(r, from, step.elements), at(r, to, step.elements)));
        break;
      case What::kDeliver:
        if (staged && root == kAllReduces)
          then(lane, moves(at(rank, Buffer::kMapped), at(rank, mine)));
        break;
    }
  }
  then(lane, {.what = Do::kAccess, .reads = {at(rank, mine)}});
}

// One stream a rank; `mistake` poisons the list of each call, in the order of ranks and calls.
Program programOf(const Direct& d, const Mistake& mistake = [](List&) {}) {
  Program program;
  for (int rank = 0; rank < d.ranks; ++rank) {
    program.lanes.emplace_back();
    for (int i = 0; i < d.calls; ++i) add(program.lanes.back(), d, rank, i, mistake);
  }
  return program;
}

using Which = std::function<bool(const ScheduleStep&)>;
Which is(What what) {
  return [=](const ScheduleStep& s) { return s.what == what; };
}
Which is(What what, Word word) {
  return [=](const ScheduleStep& s) { return s.what == what && s.word == word; };
}
Mistake without(const Which& what) {
  return [=](List& list) { std::erase_if(list, what); };
}
// Each step of a kind is moved behind the last of another, if there is one later.
Mistake late(const Which& what, const Which& where) {
  return [=](List& list) {
    const auto last = std::find_if(list.rbegin(), list.rend(), where).base();
    std::stable_partition(list.begin(), last, [&](const ScheduleStep& s) { return !what(s); });
  };
}

// Both methods find something; `kind` is what can be seen in some state.
void fails(const char* what, bool Explored::* kind, const Direct& d, const Mistake& mistake) {
  const Program program = programOf(d, mistake);
  CHECK(!order(program).proven());
  CHECK(everyState(what, program).*kind);
}
const Direct kRotating{.ranks = 3, .calls = 4, .shared = false, .staged = true};
const Direct kShared{.ranks = 3, .calls = 2, .shared = true, .staged = true};
void fails(const char* what, bool Explored::* kind, const Mistake& mistake) {
  fails(what, kind, kRotating, mistake);
  fails(what, kind, kShared, mistake);
}

}  // namespace

TEST(every_state_of_the_direct_schedule) {
  for (int ranks = 2; ranks <= 4; ++ranks) {
    holds("one leader, rotating", programOf({ranks, ranks + 2, false, true}));
    holds("one leader, not staged", programOf({ranks, ranks + 2, false, false}));
  }
  for (const bool staged : {false, true}) {
    holds("2 leaders", programOf({2, 4, true, staged}));
    holds("3 leaders", programOf({3, 3, true, staged, 2}));
  }
  holds("4 leaders", programOf({4, 2, true, true}));
  holds("in place", programOf({3, 4, false, false, 1, true}));
  holds("2 ranks, all kinds in turn", programOf({2, 8, false, true, 0, true, true}));
  holds("3 ranks, all kinds in turn", programOf({3, 4, true, true, 1, false, true}));
}

TEST(every_state_where_each_rank_leads_for_itself) {
  const auto own = [](int ranks, int calls, std::vector<int> roots, bool in_place = false) {
    return programOf({.ranks = ranks,
                      .calls = calls,
                      .shared = true,
                      .staged = true,
                      .in_place = in_place,
                      .own = std::move(roots)});
  };
  holds("2 ranks read each other", own(2, 5, {kEverybody}));
  holds("3 ranks read each other", own(3, 3, {kEverybody}));
  holds("3 ranks read the root", own(3, 5, {1}));
  holds("4 ranks read one root, then another", own(4, 3, {1, 2, 0}));
  holds("2 ranks, kinds in turn", own(2, 6, {kAllReduces, kEverybody, 0, 1, kEverybody, 1}));
  holds("3 ranks, kinds in turn", own(3, 4, {kEverybody, 2, kAllReduces, 0}, true));
}

TEST(all_executions_of_long_direct_schedules_are_in_order) {
  for (int ranks = 2; ranks <= 8; ++ranks)
    for (int kinds = 0; kinds < 16; ++kinds) {
      const Order proof = order(programOf({.ranks = ranks,
                                           .calls = 2 * ranks + 1,
                                           .shared = (kinds & 1) != 0,
                                           .staged = (kinds & 2) != 0,
                                           .first = ~uint64_t{0} - 3,
                                           .in_place = (kinds & 4) != 0,
                                           .alternates = (kinds & 8) != 0}));
      CHECK_EQ(proof.wrong, "");
      CHECK(proof.races.empty());
    }
}

TEST(all_executions_of_long_schedules_of_all_kinds_are_in_order) {
  for (int ranks = 2; ranks <= 8; ++ranks)
    for (const bool shared : {false, true}) {
      std::vector<int> own{kEverybody, kAllReduces, kEverybody, kEverybody};
      for (int r = 0; r < ranks; ++r) own.insert(own.end(), {r, r, kAllReduces});
      const Order proof = order(programOf({.ranks = ranks,
                                           .calls = static_cast<int>(own.size()) + 3,
                                           .shared = shared,
                                           .staged = true,
                                           .alternates = true,
                                           .own = own}));
      CHECK_EQ(proof.wrong, "");
      CHECK(proof.races.empty());
    }
}

TEST(mistakes_in_a_direct_schedule_are_found) {
  const Which set_ready = is(What::kSet, Word::kReady), set_done = is(What::kSet, Word::kDone);
  const Which await_ready = is(What::kAwait, Word::kReady);
  const Which take_ready = is(What::kTake, Word::kReady), take_done = is(What::kTake, Word::kDone);
  const auto race = &Explored::race, deadlock = &Explored::deadlock, lost = &Explored::lost_signal;
  fails("ready is not taken", lost, without(take_ready));
  fails("done is not taken", lost, without(take_done));
  fails("ready is not set", deadlock, without(set_ready));
  fails("done is not set", deadlock, without(set_done));
  fails("done before the sums are there", race, late(is(What::kLead), set_done));
  fails("ready before the input is there", race, late(is(What::kStage), set_ready));
  fails("ready is taken before it is there", lost, without(await_ready));
  fails("nobody waits for ready", lost, [&](List& list) {
    without(await_ready)(list);
    without(take_ready)(list);
  });
  fails("delivered before done", race, [](List& list) {
    late(is(What::kAwait, Word::kDone), is(What::kDeliver))(list);
    late(is(What::kTake, Word::kDone), is(What::kDeliver))(list);
  });
  // With one leader its peers come back to its words only after others have led.
  const Mistake after_done = late(take_ready, set_done);
  fails("ready is taken after done is set", lost, kShared, after_done);
  holds("the same, with rotating leaders", programOf(kRotating, after_done));
  // Where each rank leads for itself.
  for (const int root : {kEverybody, 1}) {
    const Direct own{.ranks = 3, .calls = 3, .shared = true, .staged = true, .own = {root}};
    fails("own: ready is not taken", lost, own, without(take_ready));
    fails("own: ready before the input is there", race, own, late(is(What::kStage), set_ready));
    fails("own: done before it was read", race, own, late(is(What::kLead), set_done));
    fails("own: done is not set", deadlock, own, without(set_done));
    fails("own: nobody waits for done", lost, own, [&](List& list) {
      without(is(What::kAwait, Word::kDone))(list);
      without(take_done)(list);
    });
  }
}
