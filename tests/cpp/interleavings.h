// Proofs about small concurrent programs: every interleaving of them, not those that a run took.
//
// A program is a list of steps a lane.  Lanes read and write data; they publish counters
// (`kPublish` makes a flag n; one lane writes it, n = 1, 2, ...) and wait for them (`kWait`: until
// it is n or more); groups of them meet at barriers; and they raise and lower words (`kSet` to 1,
// `kAwait` until it is 1, `kTake` to 0).  No step depends on data, so a lane's list is the same in
// every execution, and all that timing decides is how the lists are merged.
//
// Two checks, which know nothing of each other.
//
// 1. `order` (happens_before.h) proves what happens before what, in all executions of a
// release/acquire memory model
//    at once.  A waiting lane may find a flag at n or at anything later.  It is only ever taken to
//    have seen the publication of n: having seen a later one it would know more, since that one's
//    lane did it after n.  So the vector clocks here are the least that any execution can have, and
//    two accesses that they order are ordered in every execution.  A relaxed publication, or a
//    relaxed look, hands over nothing.  If every two accesses to a byte, one a write, are ordered,
//    then no execution has a data race, and each read finds the one write that is last before it:
//    all executions compute the same.
//      That one merge of the lists suffices: nothing ever disables a step (a counter only grows, a
//    barrier waits for all of its group), so the merges all pass through the same steps, and if one
//    gets to the end, none can get stuck.
//      Words do go back, so their argument is one more.  Each step of a word counts as a write of
//    it (a look as a read), and they must alternate: set, seen, taken, set ...  If all of them are
//    ordered so, then in every execution a look that finds 1 finds the set it waits for (an older 1
//    was taken by the looking lane itself, a later one comes only after the take): no signal is
//    lost, and a word is a counter in disguise.
//
//    Data may carry its own flag: `kPost` stores a word with the number n, and `kFind` waits for
//    it. That hands over nothing but the word.  Each post must come after all looks at what the
//    word had before, or one of them may never find its number.  No more is asked of it.
//
// 2. `explore` (every_state.h) visits every state that any merge can reach, one step at a time,
// under sequential
//    consistency, and looks into each: whether two lanes are both about to touch a byte, one of
//    them to write it (a race); whether nobody can go on (a deadlock); whether a word is set that
//    is 1, or taken that is 0 (a lost signal).  It sees no memory orders, but shares no reasoning
//    with the first: it believes only that a counter's value follows from where its lane is.  All
//    that a lane touches between two steps that others can notice is one step; a race in the middle
//    of such a step is one at its beginning too, since nobody can tell how far a lane has come.
//
// Both speak of the one program they are given (so many ranks, lanes, slices, calls), and of the
// model: that a release at the system's scope hands over all that came before it in a block's
// barriers too, and an acquire takes it, is what PTX promises of st.release, ld.acquire and
// bar.sync, and is not shown here.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

namespace interleavings {

struct Range {
  size_t begin, end;
};

struct Step {
  enum class Do : uint8_t { kAccess, kPublish, kWait, kBarrier, kSet, kAwait, kTake, kPost, kFind };
  Do what;
  size_t at = 0;                         // the flag, word or group
  uint64_t n = 0;                        // kPublish, kWait, kPost, kFind
  bool orders = true;                    // kPublish, kWait: a release, an acquire
  std::vector<Range> reads{}, writes{};  // kAccess
};

// Adds a step to a lane.  Accesses without a step between them that others can notice are one.
inline void then(std::vector<Step>& lane, const Step& step) {
  if (step.what != Step::Do::kAccess || lane.empty() || lane.back().what != Step::Do::kAccess) {
    lane.push_back(step);
    return;
  }
  Step& last = lane.back();
  last.reads.insert(last.reads.end(), step.reads.begin(), step.reads.end());
  last.writes.insert(last.writes.end(), step.writes.begin(), step.writes.end());
}

struct Program {
  std::vector<std::vector<Step>> lanes;
  std::vector<std::vector<size_t>> groups;  // whose barriers; lanes
  std::vector<size_t> set{};                // words that are 1 at first
};

// Memory as the program cuts it: pieces that each access takes whole or not at all, by number.
class Pieces {
 public:
  explicit Pieces(const Program& program) {
    for (const auto& lane : program.lanes)
      for (const Step& step : lane)
        for (const auto* ranges : {&step.reads, &step.writes})
          for (const Range& r : *ranges) cuts_.insert(cuts_.end(), {r.begin, r.end});
    std::sort(cuts_.begin(), cuts_.end());
    cuts_.erase(std::unique(cuts_.begin(), cuts_.end()), cuts_.end());
  }
  size_t count() const { return cuts_.size(); }
  size_t address(size_t piece) const { return cuts_[piece]; }
  // In order, each once.
  std::vector<size_t> of(const std::vector<Range>& ranges) const {
    std::set<size_t> pieces;
    for (const Range& r : ranges)
      for (size_t i = index(r.begin); i < index(r.end); ++i) pieces.insert(i);
    return {pieces.begin(), pieces.end()};
  }

 private:
  size_t index(size_t address) const {
    return static_cast<size_t>(std::lower_bound(cuts_.begin(), cuts_.end(), address) -
                               cuts_.begin());
  }
  std::vector<size_t> cuts_;
};

}  // namespace interleavings
