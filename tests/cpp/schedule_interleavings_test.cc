// The direct schedule in every interleaving (interleavings.h): the lists that the ranks' streams
// run (direct_schedule.h), several calls in a row, lose no signal, race for no byte and never get
// stuck; lists with a mistake in them do.
#include <algorithm>
#include <functional>
#include <set>
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
  size_t pieces = 1;
  bool one_half = false;  // as in replays of a graph of one call
  bool mixed = false;     // some ranks' tensors are staged, by turns, and `staged` does not matter
  // Of the lists in which ranks tell where tensors are.  A host is a call ahead of its stream.
  size_t places = 2;
  bool tells_late = false;  // behind `ready`
};
constexpr int kAllReduces = -2;  // in `own`

// Each rank has two halves that its peers map, an input and an output, and a list.
constexpr size_t kCount = 1000;
enum class Buffer : uint8_t { kFirst, kSecond, kInput, kOutput, kTold, kFound };
constexpr size_t kBuffers = 6;
Range at(int rank, Buffer buffer, Span elements = {0, kCount}) {
  const size_t begin =
      (static_cast<size_t>(rank) * kBuffers + static_cast<size_t>(buffer)) * kCount;
  return {begin + elements.begin, begin + elements.end()};
}
Range halfOf(int rank, const ScheduleStep& step, Span elements) {
  elements.begin -= step.piece.begin;
  return at(rank, step.half ? Buffer::kSecond : Buffer::kFirst, elements);
}
Step moves(Range from, Range to) {
  return {.what = Do::kAccess, .reads = {from}, .writes = {to}};
}

size_t wordOf(const Direct& d, int waiter, size_t index) {
  return static_cast<size_t>(waiter) * kHalves * 2 * static_cast<size_t>(d.ranks) + index;
}

void add(std::vector<Step>& lane, const Direct& d, int rank, int i, const Mistake& mistake) {
  const bool shared = d.shared != (d.alternates && i % 2);
  const bool staged = d.staged != (d.alternates && i / 2 % 2);
  const Buffer mine = d.in_place ? Buffer::kInput : Buffer::kOutput;
  // Leaders may write the sums where the addends were, which is the harder case.
  const int root = d.own.empty() ? kAllReduces : d.own[static_cast<size_t>(i) % d.own.size()];
  const std::vector<Span> pieces = piecesOf(kCount, ceilDiv(kCount, d.pieces));
  const auto stages = [&](int r) { return d.mixed ? (r + i) % 2 == 0 : staged; };
  const auto told = [&](int r, int call) {
    return at(r, Buffer::kTold, {static_cast<size_t>(call) % d.places, 1});
  };
  bool tells = true;
  const uint64_t first = d.first + static_cast<uint64_t>(i) * (d.one_half ? kHalves : d.pieces);
  List list = root == kAllReduces
                  ? directSchedule(rank, d.ranks, pieces, first, shared, stages(rank))
                  : ownSchedule(rank, d.ranks, pieces, first, root);
  mistake(list);
  // The user's kernels in the same stream write the input first and read the output last.
  then(lane, {.what = Do::kAccess, .writes = {at(rank, Buffer::kInput)}});
  if (i == 0 && !d.tells_late) then(lane, {.what = Do::kAccess, .writes = {told(rank, 0)}});
  for (const ScheduleStep& step : list) {
    const size_t word = wordOf(d, waiterOf(step), wordIndex(step, d.ranks));
    switch (step.what) {
      case What::kBegin:
      case What::kEnd:
        break;
      case What::kStage:
        then(lane, moves(at(rank, Buffer::kInput, step.piece), halfOf(rank, step, step.piece)));
        break;
      case What::kSet:
        then(lane, on(Do::kSet, word));
        if (step.word == Word::kReady && root == kAllReduces && std::exchange(tells, false))
          then(lane, {.what = Do::kAccess, .writes = {told(rank, i + !d.tells_late)}});
        break;
      case What::kLook:
        for (int r = 0; r < d.ranks; ++r)
          if (r != rank) then(lane, moves(told(r, i), at(rank, Buffer::kFound)));
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
            then(lane, moves(halfOf(r, step, step.piece), at(rank, mine, step.piece)));
        if (root == kAllReduces)
          then(lane, {.what = Do::kAccess, .reads = {at(rank, Buffer::kFound)}});
        for (int r = 0; root == kAllReduces && r < d.ranks; ++r)
          if (stages(r))
            then(lane, moves(halfOf(r, step, step.elements), halfOf(r, step, step.elements)));
          else
            then(lane, moves(at(r, Buffer::kInput, step.elements), at(r, mine, step.elements)));
        break;
      case What::kDeliver:
        if (stages(rank) && root == kAllReduces)
          then(lane, moves(halfOf(rank, step, step.piece), at(rank, mine, step.piece)));
        break;
    }
  }
  then(lane, {.what = Do::kAccess, .reads = {at(rank, mine)}});
}

// One stream a rank; `mistake` poisons the list of each call, in the order of ranks and calls.
Program programOf(const Direct& d, const Mistake& mistake = [](List&) {}) {
  Program program;
  for (int rank = 0; rank < d.ranks; ++rank)
    for (int half = 0; half < kHalves; ++half)
      for (int setter = 0; setter < d.ranks; ++setter)
        if (setter != rank)
          program.set.push_back(wordOf(d, rank, wordIndex(Word::kFree, half, setter, d.ranks)));
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

// An owner awaits and takes the words of the first of its readers only.
Mistake ofOneReader(const Which& await, const Which& take) {
  return [=](List& list) {
    int reader = -1;
    std::erase_if(list, [&](const ScheduleStep& step) {
      if (!await(step) && !take(step)) return false;
      if (reader < 0) reader = step.leader;
      return step.leader != reader;
    });
  };
}

// Both methods find something; `kind` is what can be seen in some state.
void fails(const char* what, bool Explored::* kind, const Direct& d, const Mistake& mistake) {
  const Program program = programOf(d, mistake);
  CHECK(!order(program).proven());
  CHECK(everyState(what, program).*kind);
}
// In one half, so that a mistake has its effect in the next call.
const Direct kRotating{.ranks = 3, .calls = 4, .shared = false, .staged = true, .one_half = true};
const Direct kShared{.ranks = 3, .calls = 2, .shared = true, .staged = true, .one_half = true};
void fails(const char* what, bool Explored::* kind, const Mistake& mistake) {
  fails(what, kind, kRotating, mistake);
  fails(what, kind, kShared, mistake);
}

// Ranks that take turns on a GPU, as processes do.  A rank goes on until its stream stops at a word
// that is not set, or with `pauses` until its call is over; then it is the turn of the next that
// can go on. Returns how often each rank had to stop: the hand-offs that it waits for.
std::vector<int> stopsOf(const Direct& d, bool pauses) {
  std::vector<std::vector<std::vector<Step>>> calls(static_cast<size_t>(d.ranks));
  std::set<size_t> set;
  for (size_t word : programOf(d).set) set.insert(word);
  for (size_t r = 0; r < calls.size(); ++r)
    for (int i = 0; i < d.calls; ++i)
      add(calls[r].emplace_back(), d, static_cast<int>(r), i, [](List&) {});
  std::vector<int> stops(calls.size());
  std::vector<std::pair<size_t, size_t>> at(calls.size());  // call, step
  const auto isOver = [&](size_t r) { return at[r].first == calls[r].size(); };
  const auto canGoOn = [&](size_t r) {
    const Step& step = calls[r][at[r].first][at[r].second];
    return step.what != Do::kAwait || set.contains(step.at);
  };
  size_t idle = 0;
  for (size_t r = 0; idle < calls.size(); r = (r + 1) % calls.size()) {
    ++idle;
    while (!isOver(r) && canGoOn(r)) {
      idle = 0;
      auto& [call, i] = at[r];
      const Step& step = calls[r][call][i];
      if (step.what == Do::kSet) set.insert(step.at);
      if (step.what == Do::kTake) set.erase(step.at);
      if (++i == calls[r][call].size()) {
        ++call, i = 0;
        if (pauses) break;
      }
      if (!isOver(r) && !canGoOn(r)) ++stops[r];
    }
  }
  for (size_t r = 0; r < calls.size(); ++r) CHECK(isOver(r));
  return stops;
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
  holds("4 leaders",
        programOf({.ranks = 4, .calls = 2, .shared = true, .staged = true, .one_half = true}));
  holds("in place", programOf({3, 4, false, false, 1, true}));
  for (const bool shared : {false, true})
    holds("some staged, some not",
          programOf({.ranks = 3, .calls = 3, .shared = shared, .staged = false, .mixed = true}));
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
                                           .alternates = (kinds & 8) != 0,
                                           .pieces = 1 + static_cast<size_t>(kinds) % 3,
                                           .mixed = kinds % 3 == 1}));
      CHECK_EQ(proof.wrong, "");
      CHECK(proof.races.empty());
    }
}

TEST(all_executions_of_long_schedules_of_all_kinds_are_in_order) {
  for (int ranks = 2; ranks <= 8; ++ranks)
    for (const int kinds : {0, 1, 2, 3, 4, 5}) {
      std::vector<int> own{kEverybody, kAllReduces, kEverybody, kEverybody};
      for (int r = 0; r < ranks; ++r) own.insert(own.end(), {r, r, kAllReduces});
      const Order proof = order(programOf({.ranks = ranks,
                                           .calls = static_cast<int>(own.size()) + 3,
                                           .shared = kinds % 2 == 1,
                                           .staged = true,
                                           .alternates = true,
                                           .own = own,
                                           .pieces = 1 + static_cast<size_t>(kinds) / 2}));
      CHECK_EQ(proof.wrong, "");
      CHECK(proof.races.empty());
    }
}

TEST(every_state_of_messages_in_pieces) {
  for (const bool shared : {true, false})
    for (const int root : {kAllReduces, kEverybody, 1})
      for (const size_t pieces : {2, 3, 4, 5})
        for (int ranks = 2; ranks <= (pieces <= 3 ? 3 : 2); ++ranks)
          if (shared || root == kAllReduces)
            holds("in pieces", programOf({.ranks = ranks,
                                          .calls = 1,
                                          .shared = shared,
                                          .staged = true,
                                          .own = {root},
                                          .pieces = pieces}));
  // A graph whose call has three pieces, replayed: the last and the first have the same half.
  for (const int root : {kAllReduces, kEverybody, 0})
    holds("replayed", programOf({.ranks = 2,
                                 .calls = 3,
                                 .shared = true,
                                 .staged = true,
                                 .own = {root},
                                 .pieces = 3,
                                 .one_half = true}));
}

TEST(a_broadcast_costs_its_root_no_hand_off) {
  for (int ranks = 2; ranks <= 8; ++ranks)
    for (const int stops :
         stopsOf({.ranks = ranks, .calls = 20, .shared = true, .staged = true, .own = {0}}, true))
      CHECK_EQ(stops, 0);
}

// All that a call of one piece costs two ranks: who comes first waits for the other's turn.
TEST(an_all_reduce_that_one_rank_leads_costs_two_ranks_one_hand_off) {
  for (const bool shared : {false, true}) {
    const std::vector<int> stops =
        stopsOf({.ranks = 2, .calls = 20, .shared = shared, .staged = true}, false);
    CHECK_EQ(stops[0] + stops[1], shared ? 40 : 21);
  }
}

// Beside pieces that are whole schedules, one behind the other.
TEST(pieces_of_a_message_are_done_two_in_a_turn) {
  for (int ranks = 2; ranks <= 8; ++ranks)
    for (const int root : {kAllReduces, kEverybody, 0})
      for (const size_t pieces : {1, 2, 3, 5, 10, 20}) {
        const Direct long_call{.ranks = ranks,
                               .calls = 1,
                               .shared = true,
                               .staged = true,
                               .own = {root},
                               .pieces = pieces};
        Direct apart = long_call;
        apart.calls = static_cast<int>(pieces);
        apart.pieces = 1;
        apart.one_half = true;
        const std::vector<int> together = stopsOf(long_call, false);
        const std::vector<int> one_by_one = stopsOf(apart, false);
        for (size_t r = 0; r < together.size(); ++r) CHECK(2 * together[r] <= one_by_one[r] + 3);
      }
}

TEST(mistakes_in_a_direct_schedule_are_found) {
  const Which set_ready = is(What::kSet, Word::kReady), set_free = is(What::kSet, Word::kFree);
  const Which await_ready = is(What::kAwait, Word::kReady);
  const Which await_free = is(What::kAwait, Word::kFree);
  const Which take_ready = is(What::kTake, Word::kReady), take_free = is(What::kTake, Word::kFree);
  const auto race = &Explored::race, deadlock = &Explored::deadlock, lost = &Explored::lost_signal;
  fails("ready is not taken", lost, without(take_ready));
  fails("free is not taken", lost, without(take_free));
  fails("ready is not set", deadlock, without(set_ready));
  fails("free is not set", deadlock, without(set_free));
  fails("free before the sums are there", race, late(is(What::kLead), set_free));
  fails("ready before the input is there", race, late(is(What::kStage), set_ready));
  fails("ready is taken before it is there", lost, without(await_ready));
  fails("nobody waits for ready", lost, [&](List& list) {
    without(await_ready)(list);
    without(take_ready)(list);
  });
  // The sums' owner does not wait for them.
  const Mistake not_again = [&](List& list) {
    const auto given = std::find_if(list.begin(), list.end(), set_ready);
    list.erase(std::remove_if(given, list.end(), await_free), list.end());
  };
  fails("delivered before the half is free", race, not_again);
  // With one leader its peers come back to its words only after others have led.
  const Mistake after_free = late(take_ready, set_free);
  fails("ready is taken after free is set", lost, kShared, after_free);
  holds("the same, with rotating leaders", programOf(kRotating, after_free));
  // Where tensors are told.
  fails("looked up before it is told", race, [&](List& list) {
    for (size_t i = 1; i < list.size(); ++i)
      for (size_t k = i; list[k].what == What::kLook && await_ready(list[k - 1]); --k)
        std::swap(list[k], list[k - 1]);
  });
  fails("looked up after free is set", race, late(is(What::kLook), set_free));
  for (Direct d : {kRotating, kShared}) {
    d.mixed = true;
    d.tells_late = true;
    fails("told when ready says that it is", race, d, [](List&) {});
    d.tells_late = false;
    d.places = 1;
    fails("told in the place of a call under way", race, d, [](List&) {});
  }
  // Where each rank leads for itself.
  for (const int root : {kEverybody, 1}) {
    const Direct own{
        .ranks = 3, .calls = 3, .shared = true, .staged = true, .own = {root}, .one_half = true};
    fails("own: ready is not taken", lost, own, without(take_ready));
    fails("own: free is not taken", lost, own, without(take_free));
    fails("own: ready before the input is there", race, own, late(is(What::kStage), set_ready));
    fails("own: free before it was read", race, own, late(is(What::kLead), set_free));
    fails("own: free is not set", deadlock, own, without(set_free));
    fails("own: nobody waits for free", lost, own, without(await_free));
    fails("own: staged before it is free", race, own, [&](List& list) {
      const auto ofFree = [&](const ScheduleStep& s) { return await_free(s) || take_free(s); };
      late(ofFree, is(What::kStage))(list);
    });
    fails("own: an owner waits for one of two readers", root == kEverybody ? lost : race, own,
          ofOneReader(await_free, take_free));
    Direct in_pieces = own;
    in_pieces.ranks = 2, in_pieces.calls = 1, in_pieces.pieces = 3;
    const Mistake in_one_half = [](List& list) {
      for (ScheduleStep& step : list) step.half = 0;
    };
    if (root == kEverybody)
      fails("own: the next piece in the same half", deadlock, in_pieces, in_one_half);
    else  // readers stage nothing
      holds("the same, of one root", programOf(in_pieces, in_one_half));
    fails("own: the next piece staged in the same half", race, in_pieces, [](List& list) {
      for (ScheduleStep& step : list)
        if (step.what == What::kStage) step.half = 0;
    });
  }
  const Direct sent{
      .ranks = 3, .calls = 3, .shared = true, .staged = true, .own = {1}, .one_half = true};
  fails("own: one reader gives back for two", race, sent, [&](List& list) {
    std::erase_if(list, [&](const ScheduleStep& s) { return set_free(s) && s.leader == 2; });
    const auto at = std::find_if(list.begin(), list.end(), set_free);
    if (at == list.end()) return;
    ScheduleStep of_the_other = *at;
    of_the_other.leader = 2;
    list.insert(at + 1, of_the_other);
  });
  // Any rank may still read what an earlier call has staged.
  const Direct mixed{.ranks = 3,
                     .calls = 2,
                     .shared = false,
                     .staged = true,
                     .own = {kEverybody, kAllReduces},
                     .one_half = true};
  fails("an all-reduce waits for its leader only", race, mixed, [&](List& list) {
    std::set<int> taken;
    for (const ScheduleStep& step : list)
      if (take_free(step)) taken.insert(step.leader);
    std::erase_if(list, [&](const ScheduleStep& step) {
      return await_free(step) && !taken.contains(step.leader);
    });
  });
}
