// All-reduce of tensors where they are: two-shot without slots.
//
// Each rank reads all ranks' addends of its own chunk, adds them, and writes the sums to all
// outputs.  Flags are exchanged twice: before the reads, so that all inputs are complete, and after
// the writes.  Two hops for any size.  In place is safe: one rank reads and writes a chunk, and one
// thread each element of it.
//
// Ranks do not agree on where their tensors are.  Each says so with its first flag, by the number
// of a segment that its peers map (memory/segment_board.h) and an offset.  Peers look the number up
// in their own tables.  A rank whose tensor they do not map, or not yet, copies it to its window
// before that flag, and the sums from there after the last one.  It copies what others read and
// write: its own chunk it reads and writes in the tensor.
//
// A rank looks whether its peers map a segment when its kernel runs, so a CUDA graph that was
// captured before they did goes without copies later.
//
// A channel has one piece of each chunk.  A message that is longer than the window is done in
// turns.  All ranks take the same turns, also those that do not use their windows.
//
// Why memory may be used again.  A rank that has all results of a turn knows that all peers have
// read its line of flags and its input, and have written its output: they publish results after
// that.  So its next turn may write the line and the window, and its caller the tensors.
//
// Failure.  A rank that gives up tells its peers that it has left, in the place of both flags.
// Those that have not begun with its tensors then never do.  Those that have end with results, or
// leave too.  It waits for one of both of each peer before its output is filled, and before the
// kernel ends and the tensors become other tensors.  That ends after kFarewell (guard.h).  Only
// memory made to be mapped is used in place.  The driver takes it back when the last process has
// closed it, so a peer that goes on even later writes to no other memory of the driver's.
//
// A rank that finds a peer in another call, or a tensor that reaches beyond its segment, gives up
// before it has touched anything.
//
// Bytes: a rank reads S / P from each tensor and writes S / P to each.  All but its own cross its
// links: 2 (P - 1) / P S.  Through device memory, all ranks on one GPU: 2 S a rank, and for a rank
// that uses the window 4 (P - 1) / P S more, which is then as much as two-shot moves.
#pragma once

#include "cuda/kernels/place.h"
#include "cuda/kernels/push.h"
#include "cuda/kernels/ring_kernel.h"

namespace ringreduce::cuda {

// P: the number of ranks, if it is known when the kernel is compiled; else 0.
template <class E, class Rules, class Block, int P = 0>
class LocatedAllReduce {
 public:
  RINGREDUCE_DEVICE LocatedAllReduce(Block& block, Guard<Block>& guard, const DeviceComm& comm,
                                     const RankCall& call, const Location& location,
                                     PeerTensors& peers, int channel, int channels)
      : block_(block),
        guard_(guard),
        comm_(comm),
        call_(call),
        location_(location),
        peers_(peers),
        exchange_(block, guard, comm, channel),
        channel_(static_cast<size_t>(channel)),
        channels_(static_cast<size_t>(channels)),
        cut_{call.count, exchange_.size()} {}

  RINGREDUCE_DEVICE void run() {
    const size_t turns = slicesOf(static_cast<int>(channel_), static_cast<int>(channels_),
                                  ceilDiv(cut_.chunkSize(), call_.slice));
    const uint64_t parts = exchange_.first(kParts), results = exchange_.first(kResults);
    // All threads take one answer, whatever is mapped meanwhile.
    const bool input_is_mapped = block_.any(block_.thread() == 0 && isMapped(location_.in));
    const bool output_is_mapped = block_.any(block_.thread() == 0 && isMapped(location_.out));
    const Location here{input_is_mapped ? location_.in : Place{},
                        output_is_mapped ? location_.out : Place{}, location_.what};
    // Unaligned elements would be added one at a time (reduce_n.h), by all ranks.
    const bool reads_window = !input_is_mapped && !isAligned(call_.input);
    const bool writes_window = !output_is_mapped && !isAligned(call_.output);
    if (guard_.failed()) {  // before a peer could find this rank's tensors
      tellLeft(parts, results);
      return;
    }
    uint64_t turn = 0;
    bool whole = true;
    for (; whole && turn < turns; ++turn) {
      if (turn > 0) block_.sync();  // the last turn's copies from the window
      if (!input_is_mapped) copyIn(turn, reads_window);
      if (block_.thread() == 0) {
        const int me = comm_.rank;
        block_.show(peers_.input[me], reads_window ? window(me, me) : input(turn, me));
        block_.show(peers_.output[me], writes_window ? window(me, me) : output(turn, me));
      }
      exchange_.post(kParts, parts + turn, here);
      whole =
          exchange_.await(kParts, parts + turn, [&](int i) { return find(i, parts + turn, turn); });
      if (!whole) break;
      add(turn);
      exchange_.post(kResults, results + turn);
      whole = exchange_.await(kResults, results + turn, [](int) { return Cause::kNone; });
      if (!whole) break;
      if (!output_is_mapped) copyOut(turn, writes_window);
    }
    if (!whole) {
      tellLeft(parts + turn, results + turn);
      // Until no peer is at work in this rank's tensors, and none will be.
      guard_.outwait(exchange_.size() - 1,
                     [&](int i) { return exchange_.hasCome(kResults, results + turn, i); });
      return;
    }
    exchange_.save(kParts, parts + turns);
    exchange_.save(kResults, results + turns);
  }

 private:
  using Stored = AsStored<E>;
  using Exchange = PushExchange<Rules, Block, P>;
  static constexpr auto kParts = DeviceLayout::Of::kParts;
  static constexpr auto kResults = DeviceLayout::Of::kResults;
  static constexpr size_t kWidth = sizeof(typename E::Stored);

  // What this rank's kernels know of rank r's segment of that number.
  RINGREDUCE_DEVICE SegmentEntry& entry(int r, uint64_t segment) const {
    return comm_.table[static_cast<size_t>(r) * kMostSegments + segment % kMostSegments];
  }
  RINGREDUCE_DEVICE bool isMapped(const Place& place) const {
    return place.segment != 0 && comm_.table &&
           Rules::template load<Rules>(entry(comm_.rank, place.segment).number) == place.segment;
  }
  RINGREDUCE_DEVICE static bool isAligned(const void* p) {
    return reinterpret_cast<uintptr_t>(p) % sizeof(Pack) == 0;
  }

  // This channel's elements of chunk r in a turn.
  RINGREDUCE_DEVICE Span part(uint64_t turn, int r) const {
    return cut_.slice(r, call_.slice, turn * channels_ + channel_);
  }
  RINGREDUCE_DEVICE const std::byte* input(uint64_t turn, int r) const {
    return static_cast<const std::byte*>(call_.input) + part(turn, r).begin * kWidth;
  }
  RINGREDUCE_DEVICE std::byte* output(uint64_t turn, int r) const {
    return static_cast<std::byte*>(call_.output) + part(turn, r).begin * kWidth;
  }
  // Their place in a rank's window.
  RINGREDUCE_DEVICE std::byte* window(int at, int r) const {
    const size_t piece = static_cast<size_t>(r) * channels_ + channel_;
    return comm_.base[at] + comm_.layout.window() + piece * call_.slice * kWidth;
  }

  RINGREDUCE_DEVICE void copyIn(uint64_t turn, bool own_too) const {
    for (int i = own_too ? -1 : 0; i < exchange_.size() - 1; ++i) {
      const int r = exchange_.peer(i);
      const Spans<1> there{{window(comm_.rank, r)}};
      const size_t n = part(turn, r).size;
      if (P > 0 || r == comm_.rank)  // its own are scaled when it adds them
        copyElements<E>(block_, n, input(turn, r), there);
      else
        Pass<E, Stored, Stored, Stored>::run(block_, n, ConstSpans<1>{{input(turn, r)}, 0}, there,
                                             call_.arithmetic, false);
    }
  }
  RINGREDUCE_DEVICE void copyOut(uint64_t turn, bool own_too) const {
    for (int i = own_too ? -1 : 0; i < exchange_.size() - 1; ++i) {
      const int r = exchange_.peer(i);
      copyElements<E>(block_, part(turn, r).size, window(comm_.rank, r),
                      Spans<1>{{output(turn, r)}});
    }
  }

  // Notes where a peer's addends and sums of this rank's chunk are.
  RINGREDUCE_DEVICE Cause find(int i, uint64_t step, uint64_t turn) const {
    const Location theirs = exchange_.location(kParts, i);
    if (theirs.what != mixed(location_.what, step)) return Cause::kMismatch;
    const int peer = exchange_.peer(i);
    const std::byte* in = placeOf(peer, theirs.in, turn);
    std::byte* out = placeOf(peer, theirs.out, turn);
    if (!in || !out) return Cause::kMismatch;
    block_.show(peers_.input[peer], in);
    block_.show(peers_.output[peer], out);
    return Cause::kNone;
  }
  // Null if the tensor does not lie in memory that is mapped here.
  RINGREDUCE_DEVICE std::byte* placeOf(int peer, const Place& place, uint64_t turn) const {
    if (place.segment == 0) return window(peer, comm_.rank);
    std::byte* data = tensorAt<Rules>(comm_.table, peer, place, call_.count * kWidth);
    return data ? data + part(turn, comm_.rank).begin * kWidth : nullptr;
  }

  // The addends of the chunk that this rank owns, first to last, and the places of their sums.
  struct Addends {
    Block& block;
    const PeerTensors& peers;
    int rank, size;
    int own = size - 1;
    static constexpr int kCount = P;
    RINGREDUCE_DEVICE int count() const { return P > 0 ? P : size; }
    RINGREDUCE_DEVICE const std::byte* operator()(int k) const {
      return block.see(peers.input[kthToAdd(rank, k, count())]);
    }
  };
  struct Sums {
    Block& block;
    const PeerTensors& peers;
    int rank, size;
    static constexpr int kCount = P;
    RINGREDUCE_DEVICE int count() const { return P > 0 ? P : size; }
    // From this rank on, so that not all write to the same one at a time.
    RINGREDUCE_DEVICE std::byte* operator()(int i) const {
      return block.see(peers.output[rank + i < count() ? rank + i : rank + i - count()]);
    }
  };
  RINGREDUCE_DEVICE void add(uint64_t turn) const {
    Pass<E, Stored, Stored, Stored>::run(
        block_, part(turn, comm_.rank).size, Addends{block_, peers_, comm_.rank, exchange_.size()},
        Sums{block_, peers_, comm_.rank, exchange_.size()}, arithmeticOf<P>(call_), true);
  }

  RINGREDUCE_DEVICE void tellLeft(uint64_t parts, uint64_t results) const {
    block_.sync();  // behind all that its threads have written
    exchange_.leave(kParts, parts);
    exchange_.leave(kResults, results);
  }

  Block& block_;
  Guard<Block>& guard_;
  const DeviceComm& comm_;
  const RankCall& call_;
  const Location& location_;
  PeerTensors& peers_;
  const Exchange exchange_;
  const size_t channel_, channels_;
  const Cut cut_;
};

}  // namespace ringreduce::cuda
