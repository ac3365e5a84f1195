// The rate of the lines between hosts, on which the ranks of a group agree while they work.
//
// Each rank knows in what time the bytes of a call have come (Transport::heardBytes).  A rank that
// waits for a late one, or reads late, finds a call slower than the line.  So the largest rate of
// all ranks and calls is taken, over a stretch of calls that ends with the same one everywhere.
//
// A choice must be the same on all ranks, so all must take a new rate with the same call.  They
// tell each other with what they send anyway: the first bytes from one rank to another in a call
// (transport/transport.h) carry the largest rate that the sender has heard of.  From which ranks a
// rank hears in a call follows from the algorithm, and is the same for all but for a shift.  So
// every rank knows, without a word, after which call all have heard of each other:
//
//     ring          from the previous rank: P-1 calls
//     bruck         from those at its distances: a few calls
//     twoshot       from all: one call
//
// Only choices that change no bit of a result follow the rate.  Whether the hierarchy is taken, and
// which schedule codes, depends on what was known when the group was made.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "algorithm/choose.h"
#include "base/clock.h"

namespace ringreduce {

// Bytes a second at which the bytes of a call came to a rank; 0 if they say nothing of the line.
// `took` begins when the first opening was there, so behind the first of `hops`.
uint64_t arrivalRate(uint64_t bytes, Nanos took, double hops, const WireCost& cost);

class AgreedLine {
 public:
  // For a group of so many ranks; `cost` is what was known when it was made.
  AgreedLine(int ranks, const WireCost& cost) : ranks_(ranks), cost_(cost) {}

  // Bytes a second, each way, that a host's line carries; 0: nothing is known yet.  From any
  // thread.
  uint64_t rate() const { return rate_.load(std::memory_order_relaxed); }
  // What this rank says in the next call; 0: nothing.
  uint64_t says() const { return tells_ ? best_ : 0; }

  // After a call that went over the streams only.  `seen`: bytes a second that came to this rank in
  // it (arrivalRate).  `heard`: the largest that another rank said in it.  Returns whether the rate
  // is new.
  bool end(const Candidate& taken, uint64_t seen, uint64_t heard);

  // Calls that carry less say nothing of a line.
  static constexpr uint64_t kLeastBytes = 128 << 10;
  // A rate is agreed on after so many bytes on a host's line, then after eight times as many, and
  // so on up to the second.
  static constexpr double kFirst = 1 << 20, kMost = 256 << 20;

 private:
  void hear(Algorithm algorithm);

  const int ranks_;
  const WireCost cost_;
  std::atomic<uint64_t> rate_ = 0;
  double carried_ = 0, until_ = kFirst;  // bytes since the last stretch began, and its length
  uint64_t seen_ = 0;                    // the largest rate of this rank's calls in it
  bool tells_ = false;                   // the ranks tell each other now
  uint64_t best_ = 0;                    // the largest that this rank has heard of
  std::vector<bool> heard_of_;           // by the distance of a rank from this one
};

}  // namespace ringreduce
