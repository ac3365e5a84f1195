// The push exchange: each rank writes into every peer's memory, in steps, and reads only its own.
//
// A step s of a channel uses the slots of set s mod kSets, one for each ordered pair of ranks, in
// two kinds that are counted apart: parts (addends) and results (finished values).  `post` tells
// every peer that all it gets in this step lies there, `await` waits for all peers.
//
// There is no counter of reads.  They follow from pushes: a peer that pushes step s has read all of
// some earlier step before, so a rank that has its push of step s may write over that earlier step.
// How far back that lies depends on the algorithm, and gives the number of sets that it needs:
//
//     one-shot   push s, await s, read s, push s+1 ...
//                A peer that pushed s has read s-1.  When a rank pushes s+1 it has awaited s: the
//                step that it writes over must be s-1 or older.  Two sets.
//     two-shot   push parts s+1; await parts s, read them, push results s; await results s-1, read
//                A peer that pushed results s has read parts s.  When a rank pushes parts s+1 it
//                has awaited results s-2: it may write over parts s-2, so three sets.  A peer that
//                pushed parts s has read results s-3.  When a rank pushes results s it has awaited
//                parts s: three sets.
//     LL         post s, without data, at the kernel's start; await s
//                It neither writes nor reads slots of the exchange (ll.h).
//     others     push s+1; await s, read s
//                (reduce-scatter, all-gather, broadcast; a rank without data pushes nothing, but
//                posts.)  A peer that pushed s has read s-2.  When a rank pushes s+1
//                it has awaited s-1: it may write over s-3.  Four sets.
//
// Fewer would race (tests/cpp/kernel_interleavings_test.cc).  Four divide 2^64, which keeps slots
// right when a counter passes it.  An operation ends with everything pushed to it read, and the
// next one, of whichever kind, goes on counting: all use the same slots and counters.
#pragma once

#include "algorithm/cut.h"
#include "cuda/kernels/guard.h"
#include "cuda/kernels/kernel_call.h"
#include "transport/shm/pipe.h"

namespace ringreduce::cuda {

// P: the number of ranks, if it is known when the kernel is compiled; else 0.
template <class Rules, class Block, int P = 0>
class PushExchange {
 public:
  using Of = DeviceLayout::Of;

  RINGREDUCE_DEVICE PushExchange(Block& block, Guard<Block>& guard, const DeviceComm& comm,
                                 int channel)
      : block_(block), guard_(guard), comm_(comm), channel_(channel) {
    static_assert(Rules::kSets <= kPushSets);
  }

  RINGREDUCE_DEVICE int size() const { return P > 0 ? P : comm_.size; }

  // The first step of this operation.
  RINGREDUCE_DEVICE uint64_t first(Of what) const { return counter(what); }

  // Where this rank writes for `peer`, and where `peer` wrote for this rank.
  RINGREDUCE_DEVICE std::byte* outgoing(Of what, uint64_t step, int peer) const {
    return comm_.base[peer] + comm_.layout.pushSlot(channel_, what, set(step), comm_.rank);
  }
  RINGREDUCE_DEVICE const std::byte* incoming(Of what, uint64_t step, int peer) const {
    return comm_.base[comm_.rank] + comm_.layout.pushSlot(channel_, what, set(step), peer);
  }

  RINGREDUCE_DEVICE void post(Of what, uint64_t step) const {
    block_.sync();
    if (guard_.failed()) return;
    enter(what, step);
  }
  // The same at a kernel's start, for a step without data.  No barrier is needed there: the stream
  // orders it behind all that the block's earlier kernels have read.
  RINGREDUCE_DEVICE void enter(Of what, uint64_t step) const {
    for (int i = firstFromTheEnd(); i < size() - 1; i += block_.threads())
      flag(peer(i), what, comm_.rank).template publish<Rules>(step + 1);
  }
  // The first peer, by its place in this order, whose flag this thread exchanges.  The last threads
  // come first: in small messages they have nothing else to do (ll.h).
  RINGREDUCE_DEVICE int firstFromTheEnd() const { return block_.threads() - 1 - block_.thread(); }
  RINGREDUCE_DEVICE bool hasCome(Of what, uint64_t step, int i) const {
    return slotIsFilled(step, flag(comm_.rank, what, peer(i)).template observe<Rules>());
  }

  RINGREDUCE_DEVICE bool await(Of what, uint64_t step) const {
    return guard_.until(
        size() - 1, [&](int i) { return hasCome(what, step, i); }, [&](int i) { return peer(i); },
        [&](int) { return step; });
  }

  // ---- with locations (located.h)

  // As post, and says to each peer, in the line of the flag, where this rank's tensors are.
  RINGREDUCE_DEVICE void post(Of what, uint64_t step, const Location& here) const {
    block_.sync();
    if (guard_.failed()) return;
    for (int i = firstFromTheEnd(); i < size() - 1; i += block_.threads()) {
      Flag& line = flag(peer(i), what, comm_.rank);
      const uint64_t words[] = {here.in.segment, here.in.offset, here.out.segment, here.out.offset,
                                mixed(here.what, step)};
      RINGREDUCE_UNROLL for (size_t w = 0; w < kLocationWords; ++w)
          Rules::template say<Rules>((&line.value)[1 + w], words[w]);
      line.template publish<Rules>(step + 1);
    }
  }
  // As await.  The thread that has seen peer(i) come asks found(i) why this rank cannot go on.
  template <class Found>
  RINGREDUCE_DEVICE bool await(Of what, uint64_t step, Found found) const {
    uint64_t seen = 0;
    return guard_.until(
        size() - 1,
        [&](int i) {
          seen = flag(comm_.rank, what, peer(i)).template observe<Rules>();
          return slotIsFilled(step, seen);
        },
        [&](int i) { return peer(i); }, [&](int) { return step; },
        [&](int i) { return slotIsFilled(step + kLeft, seen) ? Cause::kAborted : found(i); });
  }
  // What peer(i) has said of itself, for the thread that has seen it come.
  RINGREDUCE_DEVICE Location location(Of what, int i) const {
    const uint64_t* words = &flag(comm_.rank, what, peer(i)).value + 1;
    const auto word = [&](int w) { return Rules::template hear<Rules>(words[w]); };
    return {{word(0), word(1)}, {word(2), word(3)}, word(4)};
  }
  // Tells all peers, in the place of a step, that this rank has given up and comes to none.
  RINGREDUCE_DEVICE void leave(Of what, uint64_t step) const {
    for (int i = firstFromTheEnd(); i < size() - 1; i += block_.threads())
      flag(peer(i), what, comm_.rank).template publish<Rules>(step + 1 + kLeft);
  }

  // Tells them so of both kinds, behind all that the block's threads have written, and waits until
  // no peer is at work in this rank's memory, and none will be.
  RINGREDUCE_DEVICE void depart(uint64_t parts, uint64_t results) const {
    block_.sync();
    leave(Of::kParts, parts);
    leave(Of::kResults, results);
    guard_.outwait(size() - 1, [&](int i) { return hasCome(Of::kResults, results, i); });
  }

  // For the next kernel; called once, by all threads.
  RINGREDUCE_DEVICE void save(Of what, uint64_t step) const {
    if (block_.thread() == 0) counter(what) = step;
  }

  // The peers in an order of each rank's own, so that not all write to the same one at a time.
  RINGREDUCE_DEVICE int peer(int i) const {
    const int p = comm_.rank + 1 + i;
    return p < size() ? p : p - size();
  }

 private:
  // Ahead of every step, so that a flag with it has come to all of them.
  static constexpr uint64_t kLeft = uint64_t{1} << 62;
  static constexpr size_t kLocationWords = sizeof(Location) / sizeof(uint64_t);
  static_assert((1 + kLocationWords) * sizeof(uint64_t) <= kLine);

  RINGREDUCE_DEVICE static uint64_t set(uint64_t step) { return slotOf(step, Rules::kSets); }
  RINGREDUCE_DEVICE Flag& flag(int at, Of what, int from) const {
    return *reinterpret_cast<Flag*>(comm_.base[at] + comm_.layout.pushedFlag(channel_, what, from));
  }
  RINGREDUCE_DEVICE uint64_t& counter(Of what) const {
    Counters& counters = comm_.local->counters[channel_];
    return what == Of::kParts ? counters.parts : counters.results;
  }

  Block& block_;
  Guard<Block>& guard_;
  const DeviceComm& comm_;
  const int channel_;
};

// The addends of one canonical chunk, first to last, as sources of a Pass: this rank's lie in its
// input, the others' where they pushed them.
template <class Rules, class Block, int P = 0>
struct PushedAddends {
  const PushExchange<Rules, Block, P>& exchange;
  uint64_t step;
  size_t offset;          // bytes into each push slot
  const std::byte* mine;  // this rank's
  int rank, chunk;
  int own = rank > chunk ? rank - chunk - 1 : rank - chunk - 1 + exchange.size();

  static constexpr int kCount = P;
  RINGREDUCE_DEVICE int count() const { return exchange.size(); }
  RINGREDUCE_DEVICE const std::byte* operator()(int k) const {
    if (k == own) return mine;
    const int r = kthToAdd(chunk, k, exchange.size());
    return exchange.incoming(DeviceLayout::Of::kParts, step, r) + offset;
  }
};

// Calls visit(chunk, begin, size) for each part of a span that lies in one chunk, as forEachPiece
// does.  Spans must come in rising order: then no division is needed.
class RisingChunks {
 public:
  RINGREDUCE_DEVICE explicit RisingChunks(size_t chunk_size)
      : size_(chunk_size), end_(chunk_size) {}

  template <class Visit>
  RINGREDUCE_DEVICE void visit(Span span, Visit visit) {
    for (size_t at = span.begin; at < span.end();) {
      for (; at >= end_; ++chunk_) end_ += size_;
      const size_t end = span.end() < end_ ? span.end() : end_;
      visit(chunk_, at, end - at);
      at = end;
    }
  }

 private:
  const size_t size_;
  size_t end_;
  int chunk_ = 0;
};

// How the elements of a call are combined; with a number of ranks that is known when the kernel is
// compiled, only SUM and AVG over these ranks (kernels.cuh).
template <int P>
RINGREDUCE_DEVICE auto arithmeticOf(const RankCall& call) {
  if constexpr (P > 0)
    return PlainSum{call.arithmetic.divide, 1.0f / static_cast<float>(P)};
  else
    return call.arithmetic;
}

}  // namespace ringreduce::cuda
