// The steps of the direct schedule, rank by rank.
#include "cuda/kernels/direct_schedule.h"

#include "base/bytes.h"

namespace ringreduce::cuda {
namespace {

using Do = ScheduleStep::Do;

// `leads(r, k)`: rank r leads piece k; `gives(r)`: leaders touch memory of r; `part(k)`: what this
// rank adds of it.  `returns`: leaders write to what owners give, and these wait for that.
template <class Leads, class Gives, class Part>
std::vector<ScheduleStep> scheduleOf(int rank, int size, const std::vector<Span>& pieces,
                                     uint64_t first, bool staged, bool returns, Leads leads,
                                     Gives gives, Part part) {
  std::vector<ScheduleStep> steps;
  if (pieces.empty()) return steps;
  const auto put = [&](Do what, size_t k) -> ScheduleStep& {
    const auto half = static_cast<int>((first + k) % kHalves);
    return steps.emplace_back(ScheduleStep{.what = what, .half = half, .piece = pieces[k]});
  };
  // A step for the word of each other rank that it concerns.
  const auto words = [&](Do what, Word word, size_t k, bool leading, auto concerned) {
    for (int i = 1; i < size; ++i) {
      const int peer = (rank + i) % size;
      if (!concerned(peer)) continue;
      ScheduleStep& step = put(what, k);
      step.word = word;
      step.leader = leading ? rank : peer;
      step.owner = leading ? peer : rank;
    }
  };
  const auto give = [&](size_t k) {
    if (!gives(rank)) return;
    const auto its_leaders = [&](int r) { return leads(r, k); };
    words(Do::kAwait, Word::kFree, k, false, [](int) { return true; });
    words(Do::kTake, Word::kFree, k, false, its_leaders);
    if (staged) put(Do::kStage, k);
    words(Do::kSet, Word::kReady, k, false, its_leaders);
  };
  const auto lead = [&](size_t k) {
    if (!leads(rank, k)) return;
    words(Do::kAwait, Word::kReady, k, true, gives);
    if (returns) put(Do::kLook, k);
    words(Do::kTake, Word::kReady, k, true, gives);
    put(Do::kLead, k).elements = part(k);
    words(Do::kSet, Word::kFree, k, true, gives);
  };
  put(Do::kBegin, 0);
  give(0);
  for (size_t k = 0; k < pieces.size(); ++k) {
    if (k + 1 < pieces.size()) give(k + 1);
    lead(k);
    if (returns) words(Do::kAwait, Word::kFree, k, false, [&](int r) { return leads(r, k); });
    put(Do::kDeliver, k);
  }
  put(Do::kEnd, pieces.size() - 1);
  return steps;
}

}  // namespace

std::vector<Span> piecesOf(size_t all, size_t most) {
  std::vector<Span> pieces;
  for (size_t i = 0; i * most < all; ++i) pieces.push_back(piece(all, most, i));
  return pieces;
}

std::vector<ScheduleStep> directSchedule(int rank, int size, const std::vector<Span>& pieces,
                                         uint64_t first, bool shared, bool staged) {
  // From the first leader of the piece on.
  const auto placeOf = [=](int r, size_t k) {
    const auto ranks = static_cast<uint64_t>(size);
    return (static_cast<uint64_t>(r) + ranks - (first + k) % ranks) % ranks;
  };
  const auto part = [&](size_t k) {
    const Span& all = pieces[k];
    const size_t each =
        roundUp(ceilDiv(all.size, static_cast<size_t>(shared ? size : 1)), kChunkElements);
    Span mine = piece(all.size, each, placeOf(rank, k));
    mine.begin += all.begin;
    return mine;
  };
  return scheduleOf(
      rank, size, pieces, first, staged, true,
      [&](int r, size_t k) { return shared || placeOf(r, k) == 0; }, [](int) { return true; },
      part);
}

std::vector<ScheduleStep> ownSchedule(int rank, int size, const std::vector<Span>& pieces,
                                      uint64_t first, int root) {
  return scheduleOf(
      rank, size, pieces, first, true, false, [=](int r, size_t) { return r != root; },
      [=](int r) { return root == kEverybody || r == root; }, [](size_t) { return Span{}; });
}

}  // namespace ringreduce::cuda
