// The direct schedule: the steps of ranks that share a GPU, in stream order.
//
// Without MPS, processes that share a GPU take turns on it: a kernel that waits for a flag of
// another process keeps that process from setting it for a whole time slice.  So here no kernel
// waits. The streams do, for words in the hosts' memory, and the work is done by leaders, whose
// kernels (stream_kernels.h) read and write the memory of all ranks.  A wait for another process
// costs a turn, a hand-off, so ranks wait as seldom as can be.
//
// The schedule of a rank is data, a list of steps to be put into its stream in this order; threads
// of a test run the same list.
//
// Halves.  A rank's staging memory has two halves.  A message goes through them in pieces, one
// after the other and over calls of all kinds: piece n of the communicator's life takes half n % 2
// of all ranks.  The next piece is staged before a piece is led, so ranks that take turns do two of
// them in a turn.
//
// Words.  For each half and each ordered pair of a leader and another rank, the owner of memory
// that the leader touches, there are two:
// - `ready`, 0 at first.  The owner sets it when its half is filled, to 1 and more: it tells where
//   the owner's tensors are.  The leader waits for it, looks, and takes it back to 0.
// - `free`, 1 at first.  The owner waits for it and takes it before it fills the half.  The leader
//   sets it to 1 when it touches the half no more.
//
// The owner awaits `free` of *all* other ranks before it fills a half, since any of them may have
// been its leader the last time, and takes those of this piece's leaders.  So `free` is a credit.
// In a reduce-scatter, an all-gather and a broadcast the owner sets `ready` and is done: leaders
// give the credit back when they come to it, and a rank waits only if it is two pieces ahead.  A
// broadcast costs its root no hand-off.  In an all-reduce leaders write the sums to the halves, or
// to the tensors, and the owner awaits `free` again, without taking it, before it delivers.
//
// Tensors where they are.  In an all-reduce a tensor in memory that all other ranks map
// (memory/segment_board.h) needs no half: leaders read or write it itself.  Ranks do not agree on
// that.  Each has a list of locations in its host's page, and sets `ready` to one more than the
// place of this call's location there.  A leader's kernel that looks reads the word, then the
// location, and finds the memory in its own GPU's table; what is not located is in the half.  So
// ranks of both sorts go together, in the same pieces.  Where another rank is in another call, or
// its tensor reaches beyond its segment, the leader touches nothing and poisons all outputs.  A
// place in the list is used again when the last call that told it has left its rank's streams: its
// leaders have set `free` since they looked.
//
// Each word alternates.  `free` is taken by its only waiter, after it has seen it, and set by a
// leader that has taken `ready`, which was set after `free` was taken.  `ready` is set by an owner
// that has seen `free`, which the leader sets after it has taken the last `ready`.
//
// Graphs.  A stream's wait compares with a value that is fixed when a CUDA graph is captured, so
// words are set and taken and do not count.  A captured call keeps its location, and its place in
// the list, for ever.  A piece uses the words of its half only, and leaves
// them as it found them once all ranks have done it.  So graphs may be replayed in any order and
// any number of times, if all ranks do the same: it does not matter whose piece had the half
// before, and two pieces in a row may take the same half.
//
// Failures.  A host that learns of one first sets the abort flags of all ranks, after which kernels
// write nothing but poison, and then the words that its own stream waits for, `free` too
// (HostRanks::release).  So no rank waits for a dead one, and the outputs of calls that had not
// ended are poisoned.  A late leader may still read a half, but kernels no longer fill it; one that
// is at work when the others give up ends its kernel, and may write to tensors until then.  A root
// whose call has ended learns by its next calls that a reader never came.
//
// An all-reduce has one leader, or as many as there are ranks where there is enough to share out
// and ranks have more than one GPU.  On one, several leaders would keep each other waiting for a
// turn more.  Which rank leads rotates with the pieces, so that the work of many small ones is
// shared out too.
//
// In the other calls each rank leads for itself: it reads the other ranks' halves and writes its
// own output.  In a broadcast only the root is read, and the root leads nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "algorithm/cut.h"
#include "cuda/kernels/device_layout.h"

namespace ringreduce::cuda {

// Which word of a leader and an owner.
enum class Word : uint8_t { kReady, kFree };
inline constexpr int kHalves = 2;
struct alignas(kLine) StreamWord {
  uint32_t word;
};

// What a failure sets all words to, which releases the streams that wait for them: until
// (int32)(word - 1) >= 0.  No rank sets it.
inline constexpr uint32_t kReleased = uint32_t{1} << 30;
static_assert(static_cast<int32_t>(kReleased - 1) >= 0);

// `ready`, if both tensors are in the half; and the longest list of other locations.
inline constexpr uint32_t kInHalf = 1;
inline constexpr uint32_t kMostTold = 1024;

struct ScheduleStep {
  enum class Do : uint8_t {
    kBegin,    // tell this rank's own host that its stream has come here
    kStage,    // copy a piece of the input into the half, which the leaders map
    kSet,      // the word becomes 1, or more if it is `ready`
    kAwait,    // the stream waits for the word to be 1 or more
    kLook,     // a leader's kernel finds where the tensors of all ranks are
    kTake,     // the word becomes 0
    kLead,     // a leader's kernel: adds, or carries
    kDeliver,  // copy the piece's sums to the output, or poison it
    kEnd,      // tell this rank's own host that the call is over
  };
  Do what;
  Word word = Word::kReady;
  int leader = 0, owner = 0;  // whose word
  int half = 0;
  Span piece{};     // of the message
  Span elements{};  // kLead, of an all-reduce: what this leader adds of it
};

// Where a word lies in its waiter's page of words: a leader waits for `ready`, an owner for `free`.
constexpr int waiterOf(const ScheduleStep& step) {
  return step.word == Word::kReady ? step.leader : step.owner;
}
constexpr size_t wordIndex(Word word, int half, int setter, int size) {
  const int place = half * 2 + static_cast<int>(word);
  return static_cast<size_t>(place * size + setter);
}
constexpr size_t wordIndex(const ScheduleStep& step, int size) {
  return wordIndex(step.word, step.half, step.word == Word::kReady ? step.owner : step.leader,
                   size);
}

// [0, all) in pieces of at most `most` each.
std::vector<Span> piecesOf(size_t all, size_t most);

// The schedule of `rank` for a call with these pieces, before which all calls had `first`.
// `staged`: this rank's input is not where leaders can read it.  `shared`: there is enough for
// every rank to lead a part.
std::vector<ScheduleStep> directSchedule(int rank, int size, const std::vector<Span>& pieces,
                                         uint64_t first, bool shared, bool staged);

// The same where each rank leads for itself.  All ranks stage data, or `root` alone if it is not
// kEverybody.
std::vector<ScheduleStep> ownSchedule(int rank, int size, const std::vector<Span>& pieces,
                                      uint64_t first, int root);

}  // namespace ringreduce::cuda
