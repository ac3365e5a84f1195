// The direct schedule: the steps of ranks that share a GPU, in stream order.
//
// Without MPS, processes that share a GPU take turns on it: a kernel that waits for a flag of
// another process keeps that process from setting it for a whole time slice.  So here no kernel
// waits. The streams do, for words in the hosts' memory, and the work is done by leaders, whose
// kernels (stream_kernels.h) read and write the memory of all ranks.  Two signals in all: every
// rank tells the leaders that its input is there, and the leaders tell every rank that the sums
// are.
//
// The schedule of a rank is data, a list of steps to be put into its stream in this order; threads
// of a test run the same list.
//
// Words.  For each ordered pair of a leader and a rank there are two, `ready` and `done`, each set
// to 1 by one side and back to 0 by the one that waited for it: a stream's wait compares with a
// value that is fixed when a CUDA graph is captured, so a counter would not do.  Each is 0 again
// before it can be set anew: a rank sets `ready` for its next call only after `done`, which its
// leader sets after it has taken `ready` back; and a leader sets `done` only after the next
// `ready`, which that rank sets after it has taken `done` back.
//
// An all-reduce has one leader, or as many as there are ranks where there is enough to share out.
// Which rank leads rotates with the calls, so that the work of many small ones is shared out too.
//
// In the other calls each rank leads for itself: it reads the other ranks' memory and writes its
// own output.  `done` then tells a rank that its memory was read and may be written again.  In a
// broadcast only the root is read, and the root leads nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "algorithm/cut.h"
#include "cuda/kernels/device_layout.h"

namespace ringreduce::cuda {

// Which of a leader's words.
enum class Word : uint8_t { kReady, kDone };

struct ScheduleStep {
  enum class Do : uint8_t {
    kBegin,    // tell this rank's own host that its stream has come here
    kStage,    // copy the input into memory that the leaders map
    kSet,      // the word becomes 1
    kAwait,    // the stream waits for the word to be 1
    kTake,     // the word becomes 0
    kLead,     // a leader's kernel: adds, or carries
    kDeliver,  // copy the sums to the output, or poison them
  };
  Do what;
  Word word = Word::kReady;
  int leader = 0, rank = 0;  // whose word
  Span elements{};           // kLead, of an all-reduce: of the message
};

// Where a word lies in its waiter's page of words: a leader waits for `ready`, a rank for `done`.
constexpr int waiterOf(Word word, int leader, int rank) {
  return word == Word::kReady ? leader : rank;
}
constexpr int setterOf(Word word, int leader, int rank) {
  return word == Word::kReady ? rank : leader;
}
constexpr size_t wordIndex(Word word, int setter, int size) {
  return static_cast<size_t>(word) * static_cast<size_t>(size) + static_cast<size_t>(setter);
}

// The schedule of `rank` for the call with this number.  `staged`: inputs are not where leaders can
// read them.  `shared`: there is enough for every rank to lead a part.
std::vector<ScheduleStep> directSchedule(int rank, int size, size_t count, uint64_t call,
                                         bool shared, bool staged);

// The same where each rank leads for itself.  All ranks stage data, or `root` alone if it is not
// kEverybody.
std::vector<ScheduleStep> ownSchedule(int rank, int size, int root);

}  // namespace ringreduce::cuda
