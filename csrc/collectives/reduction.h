// How shared memory adds: a reduction over the exchange by one of two algorithms that give the same
// bits, and the primitives of the ring.  The result arrives at all ranks (all_reduce.cc) or at one
// (reduce.cc).
//
// Both algorithms cut the message canonically (algorithm/cut.h) and add chunk c in the order c+1,
// ..., c, or in that of ranks, with halves accumulated in float32 and rounded once.
//
// If a rank is lost in the middle, Exchange::find and shared return null for it, and each element
// is reduced over the ranks that contributed to it, and an average divides by their number.  A
// slice that the lost rank has posted includes it; later slices do not.  In two-shot, all ranks add
// the part of a lost rank that it has not shared, without the lost rank: its own addends of that
// part never were in a slot.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "algorithm/cut.h"
#include "algorithm/ring.h"
#include "base/bytes.h"
#include "collectives/collectives.h"
#include "collectives/shared_memory.h"
#include "kernels/reduce.h"

namespace ringreduce {

struct Reducible {
  const void* input;
  void* output;  // may be the input; null where the result is not wanted
  size_t count;
  DType dtype;
  ReduceOp op;
  int root = kEverybody;

  static constexpr int kEverybody = -1;
};

class Reduction {
 public:
  Reduction(OverMemory& c, const Reducible& r);

  // Each rank puts all of a slice into its slot; a rank that wants the result adds all slots.  It
  // reads its own addends from its own memory, which is in cache and about to be written.
  void direct();

  // A slice is shared out: each rank puts the others' parts into its slot, adds its own part of all
  // slots, and writes the sum into its slot; a rank that wants the result copies it from there.
  void twoShot();

 private:
  static constexpr int kNoRank = -1;

  bool wanted() const { return r_.root == Reducible::kEverybody || r_.root == c_.rank; }
  bool wantedByOthers() const { return r_.root != c_.rank; }

  Span slice(uint64_t j) const { return piece(r_.count, slice_, j); }
  // Rank p's part of slice j when the addition is shared out.
  Span part(uint64_t j, int p) const;
  const std::byte* input(size_t element) const {
    return static_cast<const std::byte*>(r_.input) + element * width_;
  }
  std::byte* output(size_t element) const {
    return static_cast<std::byte*>(r_.output) + element * width_;
  }
  // Where an element of slice j lies in a slot.
  size_t inSlot(size_t element, uint64_t j) const { return (element - slice(j).begin) * width_; }
  // Waits for all slots of slice j.
  void gatherSources(uint64_t j);
  // dst = the reduction of `span`, whose elements lie in the slots of slice j and in user memory.
  // Leaves rank `excluded` out.
  void reduce(Span span, std::byte* dst, uint64_t j, int excluded = kNoRank);

  OverMemory& c_;
  const Reducible r_;
  const ReduceKernels& kernels_;
  const Cut cut_;
  const size_t width_, slice_;  // bytes an element, elements a slice
  const uint64_t slices_, first_;
  // The peers' slots of the slice being added; null for ranks that are lost.
  std::vector<const std::byte*> sources_;
  std::vector<const void*> ordered_;  // the addends of a chunk, first to last
};

// Rank r reduces chunk r of all inputs where they lie, and writes it to the data of `root`, or of
// all ranks.  No other rank reads or writes that chunk.  `data`: of each rank, here.
void reduceInPlace(OverMemory& c, const std::vector<std::byte*>& data, size_t count, DType dtype,
                   ReduceOp op, int root);

// The five ring primitives (algorithm/ring.h) for a CPU: slots of links, and the reduction kernels.
//
// On their way to the owner, halves travel as float32 (the kernels' partial type): they are rounded
// once, by the owner.  From there on the finished values travel as they are.
class HostPrimitives {
 public:
  // `slice` is in elements; a slice of the partial type fits a slot.
  HostPrimitives(OverMemory& c, const AllReduce& a, const ReduceKernels& kernels, size_t slice)
      : c_(c),
        kernels_(kernels),
        data_(static_cast<std::byte*>(a.data)),
        width_(sizeOf(a.dtype)),
        slice_(slice),
        cut_{a.count, c.size} {}

  void send(int chunk, size_t j) {
    const Span s = span(chunk, j);
    kernels_.widen(c_.next.acquire(), at(s), s.size);
    c_.next.post();
  }

  void recvReduceSend(int chunk, size_t j) {
    const Span s = span(chunk, j);
    const std::byte* in = peek();
    kernels_.combine(c_.next.acquire(), in, at(s), s.size);
    c_.prev.release();
    c_.next.post();
  }

  void recvReduceCopySend(int chunk, size_t j) {
    const Span s = span(chunk, j);
    kernels_.finish(at(s), peek(), at(s), s.size, c_.size);
    c_.prev.release();
    copyBytes(c_.next.acquire(), at(s), s.size * width_);
    c_.next.post();
  }

  void recvCopySend(int chunk, size_t j) {
    recv(chunk, j);
    const Span s = span(chunk, j);
    copyBytes(c_.next.acquire(), at(s), s.size * width_);
    c_.next.post();
  }

  void recv(int chunk, size_t j) {
    const Span s = span(chunk, j);
    const std::byte* in = peek();
    copyBytes(at(s), in, s.size * width_);
    c_.prev.release();
  }

 private:
  Span span(int chunk, size_t j) const { return cut_.slice(chunk, slice_, j); }
  std::byte* at(Span s) const { return data_ + s.begin * width_; }

  const std::byte* peek() {
    const std::byte* slot = c_.prev.peek();
    if (!verified_) {
      c_.watch.verify(c_.previousRank());
      verified_ = true;
    }
    return slot;
  }

  OverMemory& c_;
  const ReduceKernels& kernels_;
  std::byte* const data_;
  const size_t width_, slice_;
  const Cut cut_;
  bool verified_ = false;
};

}  // namespace ringreduce
