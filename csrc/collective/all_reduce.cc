// All-reduce by three algorithms, which give the same bits: direct, two-shot and ring.
//
// All three cut the message canonically (plan/cut.h) and add chunk c in the order c+1, ..., c, with
// halves accumulated in float32 and rounded once.

#include <algorithm>
#include <vector>

#include "base/copy.h"
#include "collective/collectives.h"
#include "collective/host_primitives.h"
#include "plan/cut.h"
#include "reduce/reduce.h"

namespace ringreduce {
namespace {

// An all-reduce under way over the exchange: what direct and two-shot have in common.
class Exchanged {
 public:
  Exchanged(Communicator& c, const AllReduce& a)
      : c_(c),
        a_(a),
        kernels_(reduceKernels(a.dtype, a.op)),
        cut_{a.count, c.size},
        width_(sizeOf(a.dtype)),
        slice_(c.exchange.slotBytes() / width_ / kChunkElements * kChunkElements),
        // Zero elements take a step as well: ranks meet, and find out if they disagree.
        slices_(std::max<uint64_t>(1, ceilDiv(a.count, slice_))),
        first_(c.exchange.begin(slices_)),
        sources_(static_cast<size_t>(c.size)),
        ordered_(static_cast<size_t>(c.size)) {}

  // Each rank puts all of a slice into its slot, then adds all slots.  Its own addends it takes
  // from its own memory, which is in cache and about to be written.
  void direct() {
    const auto fill = [&](uint64_t j) {
      const Span s = slice(j);
      copyBytes(c_.exchange.acquire(first_ + j), at(s.begin), s.size * width_);
      c_.exchange.post(first_ + j);
    };
    pipeline(fill, [&](uint64_t j) {
      gatherSources(j);
      reduce(slice(j), at(slice(j).begin), slice(j));
      c_.exchange.release(first_ + j);
    });
  }

  // A slice is shared out: each rank puts into its slot what others are to add, adds its own part
  // of everybody's, writes that into its slot, and copies the others' parts of the sum from theirs.
  void twoShot() {
    const auto fill = [&](uint64_t j) {
      std::byte* slot = c_.exchange.acquire(first_ + j);
      for (int p = 0; p < c_.size; ++p)
        if (p != c_.rank) copyPart(slot, part(j, p), /*into_slot=*/true, j);
      c_.exchange.post(first_ + j);
    };
    const auto add = [&](uint64_t j) {
      gatherSources(j);
      const Span mine = part(j, c_.rank);
      reduce(mine, at(mine.begin), slice(j));
      copyPart(own_slot_, mine, /*into_slot=*/true, j);
      c_.exchange.share(first_ + j);
    };
    const auto collect = [&](uint64_t j) {
      for (int k = 1; k < c_.size; ++k) {
        const int p = (c_.rank + k) % c_.size;
        copyPart(const_cast<std::byte*>(c_.exchange.shared(p, first_ + j)), part(j, p),
                 /*into_slot=*/false, j);
      }
      c_.exchange.release(first_ + j);
    };
    pipeline(fill, [&](uint64_t j) {
      add(j);
      if (j > 0) collect(j - 1);
    });
    collect(slices_ - 1);
  }

 private:
  // A few fills first, then alternately one fill and one `rest`: a slice is in its slot well before
  // peers look for it.  A rank fills at most this many slices more than it has added, which leaves
  // room for those that slower ranks still read, and in two-shot for the one still to be collected.
  template <class Fill, class Rest>
  void pipeline(Fill fill, Rest rest) {
    const auto ahead = static_cast<uint64_t>(c_.exchange.depth() / 2 - 1);
    for (uint64_t j = 0; j < std::min(ahead, slices_); ++j) fill(j);
    for (uint64_t j = 0; j < slices_; ++j) {
      if (j + ahead < slices_) fill(j + ahead);
      rest(j);
    }
  }

  Span slice(uint64_t j) const { return piece(a_.count, slice_, j); }

  // Rank p's part of slice j when the addition is shared out.
  Span part(uint64_t j, int p) const {
    const Span s = slice(j);
    const size_t step = roundUp(ceilDiv(s.size, static_cast<size_t>(c_.size)), kChunkElements);
    Span span = piece(s.size, step, static_cast<size_t>(p));
    span.begin += s.begin;
    return span;
  }

  std::byte* at(size_t element) const {
    return static_cast<std::byte*>(a_.data) + element * width_;
  }

  void copyPart(std::byte* slot, Span span, bool into_slot, uint64_t j) const {
    std::byte* there = slot + (span.begin - slice(j).begin) * width_;
    if (into_slot)
      copyBytes(there, at(span.begin), span.size * width_);
    else
      copyBytes(at(span.begin), there, span.size * width_);
  }

  // Waits for everybody's slot of slice j.
  void gatherSources(uint64_t j) {
    for (int k = 0; k < c_.size; ++k) {
      const int r = (c_.rank + k) % c_.size;
      if (r == c_.rank)
        own_slot_ = c_.exchange.own(first_ + j);
      else
        sources_[static_cast<size_t>(r)] = c_.exchange.peek(r, first_ + j);
    }
  }

  // dst = the reduction of `span`, whose elements lie in the slots of `slice` and in user memory.
  void reduce(Span span, std::byte* dst, Span slice) {
    cut_.forEachChunk(span, [&](int chunk, size_t begin, size_t n) {
      for (int k = 0; k < c_.size; ++k) {
        const int r = kthToAdd(chunk, k, c_.size);
        ordered_[static_cast<size_t>(k)] =
            r == c_.rank ? at(begin)
                         : sources_[static_cast<size_t>(r)] + (begin - slice.begin) * width_;
      }
      kernels_.reduce(dst + (begin - span.begin) * width_, ordered_.data(), c_.size, n, c_.size);
    });
  }

  Communicator& c_;
  const AllReduce& a_;
  const ReduceKernels& kernels_;
  const Cut cut_;
  const size_t width_, slice_;  // bytes an element, elements a slice
  const uint64_t slices_, first_;
  std::vector<std::byte*> sources_;   // the peers' slots of the slice being added
  std::vector<const void*> ordered_;  // the addends of a chunk, first to last
  std::byte* own_slot_ = nullptr;
};

void ring(Communicator& c, const AllReduce& a) {
  const ReduceKernels& kernels = reduceKernels(a.dtype, a.op);
  const size_t widest = std::max(sizeOf(kernels.partial), sizeOf(a.dtype));
  const size_t slice = c.link_slots.bytes / widest / kChunkElements * kChunkElements;
  HostPrimitives primitives(c, a, kernels, slice);
  const Cut cut{a.count, c.size};
  runRing(primitives, {.rank = c.rank,
                       .world_size = c.size,
                       .slices = std::max<size_t>(1, ceilDiv(cut.chunkSize(), slice)),
                       .window = static_cast<size_t>(c.link_slots.depth) / 2});
}

}  // namespace

void allReduce(Communicator& c, const AllReduce& a) {
  if (a.op == ReduceOp::kPremulSum) scale(a.dtype, a.data, a.data, a.count, a.factor);
  if (c.size == 1) return;  // the sum, the average, the least of one value is that value
  switch (chooseAllReduce(a.count * sizeOf(a.dtype), c.size, c.algorithm)) {
    case Algorithm::kTwoShot:
      return Exchanged(c, a).twoShot();
    case Algorithm::kRing:
      return ring(c, a);
    default:
      return Exchanged(c, a).direct();
  }
}

}  // namespace ringreduce
