// The steps of the direct schedule, rank by rank.
#include "cuda/kernels/direct_schedule.h"

#include "base/bytes.h"

namespace ringreduce::cuda {
namespace {

using Do = ScheduleStep::Do;

// Of `rank`, with leaders in this order.  `reads(leader, r)`: the leader touches memory of rank r.
template <class Reads>
std::vector<ScheduleStep> scheduleOf(int rank, int size, const std::vector<int>& leaders,
                                     bool stages, Reads reads, Span elements) {
  std::vector<ScheduleStep> steps;
  const auto word = [&](Do what, Word w, int leader, int of) {
    steps.push_back({.what = what, .word = w, .leader = leader, .rank = of});
  };
  steps.push_back({.what = Do::kBegin});
  if (stages) steps.push_back({.what = Do::kStage});
  for (int leader : leaders)
    if (leader != rank && reads(leader, rank)) word(Do::kSet, Word::kReady, leader, rank);
  for (int leader : leaders) {
    if (leader != rank) continue;
    for (int k = 1; k < size; ++k) {
      const int peer = (rank + k) % size;
      if (!reads(rank, peer)) continue;
      word(Do::kAwait, Word::kReady, rank, peer);
      word(Do::kTake, Word::kReady, rank, peer);
    }
    steps.push_back({.what = Do::kLead, .elements = elements});
    for (int k = 1; k < size; ++k)
      if (const int peer = (rank + k) % size; reads(rank, peer))
        word(Do::kSet, Word::kDone, rank, peer);
  }
  for (int leader : leaders) {
    if (leader == rank || !reads(leader, rank)) continue;
    word(Do::kAwait, Word::kDone, leader, rank);
    word(Do::kTake, Word::kDone, leader, rank);
  }
  steps.push_back({.what = Do::kDeliver});
  return steps;
}

}  // namespace

std::vector<ScheduleStep> directSchedule(int rank, int size, size_t count, uint64_t call,
                                         bool shared, bool staged) {
  const int first = static_cast<int>(call % static_cast<uint64_t>(size));
  const auto most = static_cast<size_t>(shared ? size : 1);
  std::vector<int> leaders;
  for (int i = 0; i < static_cast<int>(most); ++i) leaders.push_back((first + i) % size);
  const size_t each = roundUp(ceilDiv(count, most), kChunkElements);
  const auto place = static_cast<size_t>((rank - first + size) % size);
  return scheduleOf(
      rank, size, leaders, staged, [](int, int) { return true; }, piece(count, each, place));
}

std::vector<ScheduleStep> ownSchedule(int rank, int size, int root) {
  std::vector<int> leaders;
  for (int r = 0; r < size; ++r)
    if (r != root) leaders.push_back(r);
  const auto is_read = [&](int r) { return root == kEverybody || r == root; };
  return scheduleOf(rank, size, leaders, is_read(rank), [&](int, int r) { return is_read(r); }, {});
}

}  // namespace ringreduce::cuda
