// Calls on tensors where they are: all-reduce as two-shot without slots, its first half, which is
// reduce-scatter, and its second one, which is all-gather.
//
// All-reduce: each rank reads all ranks' addends of its own chunk, adds them, and writes the sums
// to all outputs.  Reduce-scatter: it reads all ranks' addends of its part, and writes the sums to
// its own output.  All-gather: it writes its input to all outputs.
//
// Flags are exchanged twice: before a rank touches its peers' tensors, so that all inputs are
// complete and all outputs may be written, and after it has.  Two hops for any size.  In place is
// safe: one rank touches a chunk, and one thread each element of it.
//
// Ranks do not agree on where their tensors are.  Each says so with its first flag, by the number
// of a segment that its peers map (memory/segment_board.h) and an offset.  Peers look the number up
// in their own tables.  A rank whose tensor they do not map, or not yet, copies it to its window
// before that flag, and results from there after the last one.  It copies what others read and
// write: its own chunk it reads and writes in the tensor.
//
// A rank looks whether its peers map a segment when its kernel runs, so a CUDA graph that was
// captured before they did goes without copies later.
//
// A channel has one piece of each chunk, or of each rank's part.  A message that is longer than the
// window is done in turns.  All ranks take the same turns, also those that do not use their
// windows.
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
// Bytes, where S is the size of all chunks or parts.  Over a rank's links: 2 (P - 1)/P S of an
// all-reduce, half of that of the others.  Through device memory, all ranks on one GPU: 2 S a rank
// of an all-reduce, (P + 1)/P S of the others, in place S of an all-gather.  A rank that uses the
// window moves 2 (P - 1)/P S more for its input, and as much for its output.  That is then as much
// as by slots.
#pragma once

#include "cuda/kernels/place.h"
#include "cuda/kernels/push.h"
#include "cuda/kernels/ring_kernel.h"

namespace ringreduce::cuda {

// What they have in common.  P: the number of ranks, if it is known when the kernel is compiled;
// else 0.
template <class E, class Rules, class Block, int P>
class LocatedCall {
 protected:
  // Which tensor has a part of `count` elements for each rank, and the other is this rank's alone.
  enum class Parts : uint8_t { kNone, kInput, kOutput };

  RINGREDUCE_DEVICE LocatedCall(Block& block, Guard<Block>& guard, const DeviceComm& comm,
                                const RankCall& call, const Location& location, PeerTensors& peers,
                                int channel, int channels, Parts parts)
      : block_(block),
        guard_(guard),
        comm_(comm),
        call_(call),
        location_(location),
        peers_(peers),
        exchange_(block, guard, comm, channel),
        channel_(static_cast<size_t>(channel)),
        channels_(static_cast<size_t>(channels)),
        elements_(parts == Parts::kNone ? call.count
                                        : call.count * static_cast<size_t>(exchange_.size())),
        chunk_(parts == Parts::kNone ? Cut{call.count, exchange_.size()}.chunkSize() : call.count),
        input_begin_(parts == Parts::kOutput ? static_cast<size_t>(comm.rank) * chunk_ : 0),
        output_begin_(parts == Parts::kInput ? static_cast<size_t>(comm.rank) * chunk_ : 0),
        // All threads take one answer, whatever is mapped meanwhile.
        input_is_mapped_(block.any(block.thread() == 0 && isMapped(location.in))),
        output_is_mapped_(block.any(block.thread() == 0 && isMapped(location.out))),
        // Elements that are not aligned as the others' would be moved one at a time (reduce_n.h).
        reads_window_(!input_is_mapped_ && !isAligned(ownInput())),
        writes_window_(!output_is_mapped_ && !isAligned(ownOutput())) {}

  // Each turn of a call, of which bring(turn) copies to the window, move(turn) moves or adds what
  // all ranks have, and take(turn) copies from the window.
  template <class Bring, class Move, class Take>
  RINGREDUCE_DEVICE void inTurns(Bring bring, Move move, Take take) {
    const size_t turns = slicesOf(static_cast<int>(channel_), static_cast<int>(channels_),
                                  ceilDiv(chunk_, call_.slice));
    // After an earlier failure peers are not told where this rank's tensors are, and so do not use
    // them.
    if (turns == 0 || guard_.failed()) return;
    const uint64_t parts = exchange_.first(kParts), results = exchange_.first(kResults);
    const Location here{input_is_mapped_ ? location_.in : Place{},
                        output_is_mapped_ ? location_.out : Place{}, location_.what};
    uint64_t turn = 0;
    bool whole = true;
    for (; whole && turn < turns; ++turn) {
      if (turn > 0) block_.sync();  // the last turn's copies from the window
      bring(turn);
      if (block_.thread() == 0) {
        const int me = comm_.rank;
        block_.show(peers_.input[me], reads_window_ ? window(me, me) : input(turn, me));
        block_.show(peers_.output[me], writes_window_ ? window(me, me) : output(turn, me));
      }
      exchange_.post(kParts, parts + turn, here);
      whole =
          exchange_.await(kParts, parts + turn, [&](int i) { return find(i, parts + turn, turn); });
      if (!whole) break;
      move(turn);
      exchange_.post(kResults, results + turn);
      whole = exchange_.await(kResults, results + turn, [](int) { return Cause::kNone; });
      if (!whole) break;
      take(turn);
    }
    if (!whole) return exchange_.depart(parts + turn, results + turn);
    exchange_.save(kParts, parts + turns);
    exchange_.save(kResults, results + turns);
  }

  // This channel's elements of chunk r in a turn.
  RINGREDUCE_DEVICE Span part(uint64_t turn, int r) const {
    const Span whole = piece(elements_, chunk_, static_cast<size_t>(r));
    const Span s = piece(whole.size, call_.slice, turn * channels_ + channel_);
    return {whole.begin + s.begin, s.size};
  }
  // Where they are in this rank's tensors, if they are there.
  RINGREDUCE_DEVICE const std::byte* input(uint64_t turn, int r) const {
    return static_cast<const std::byte*>(call_.input) +
           (part(turn, r).begin - input_begin_) * kWidth;
  }
  RINGREDUCE_DEVICE std::byte* output(uint64_t turn, int r) const {
    return static_cast<std::byte*>(call_.output) + (part(turn, r).begin - output_begin_) * kWidth;
  }
  // Their place in a rank's window.
  RINGREDUCE_DEVICE std::byte* window(int at, int r) const {
    const size_t piece = static_cast<size_t>(r) * channels_ + channel_;
    return comm_.base[at] + comm_.layout.window() + piece * call_.slice * kWidth;
  }
  // Copies results from the window: the peers', this rank's own, or both.
  RINGREDUCE_DEVICE void copyOut(uint64_t turn, bool peers_too, bool own_too) const {
    for (int i = own_too ? -1 : 0; i < (peers_too ? exchange_.size() - 1 : 0); ++i) {
      const int r = exchange_.peer(i);
      copyElements<E>(block_, part(turn, r).size, window(comm_.rank, r),
                      Spans<1>{{output(turn, r)}});
    }
  }

  static constexpr size_t kWidth = sizeof(typename E::Stored);

  Block& block_;
  Guard<Block>& guard_;
  const DeviceComm& comm_;
  const RankCall& call_;
  const Location& location_;
  PeerTensors& peers_;
  const PushExchange<Rules, Block, P> exchange_;
  const size_t channel_, channels_;
  const size_t elements_, chunk_;            // of all ranks, and of one
  const size_t input_begin_, output_begin_;  // the first element that lies there
  const bool input_is_mapped_, output_is_mapped_;
  const bool reads_window_, writes_window_;  // of its own chunk, too

 private:
  static constexpr auto kParts = DeviceLayout::Of::kParts;
  static constexpr auto kResults = DeviceLayout::Of::kResults;

  // What this rank's kernels know of rank r's segment of that number.
  RINGREDUCE_DEVICE SegmentEntry& entry(int r, uint64_t segment) const {
    return comm_.table[static_cast<size_t>(r) * kMostSegments + segment % kMostSegments];
  }
  RINGREDUCE_DEVICE bool isMapped(const Place& place) const {
    return place.segment != 0 && comm_.table &&
           Rules::template load<Rules>(entry(comm_.rank, place.segment).number) == place.segment;
  }
  RINGREDUCE_DEVICE static bool isAligned(const std::byte* p) {
    return reinterpret_cast<uintptr_t>(p) % sizeof(Pack) == 0;
  }
  // Where this rank's own chunk begins.
  RINGREDUCE_DEVICE const std::byte* ownInput() const {
    return static_cast<const std::byte*>(call_.input) + ownBegin(input_begin_);
  }
  RINGREDUCE_DEVICE const std::byte* ownOutput() const {
    return static_cast<const std::byte*>(call_.output) + ownBegin(output_begin_);
  }
  RINGREDUCE_DEVICE size_t ownBegin(size_t first) const {
    return (static_cast<size_t>(comm_.rank) * chunk_ - first) * kWidth;
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
    std::byte* data = tensorAt<Rules>(comm_.table, peer, place, elements_ * kWidth);
    return data ? data + part(turn, comm_.rank).begin * kWidth : nullptr;
  }
};

// All-reduce, and reduce-scatter (call.scatter).  Part r of a reduce-scatter is one chunk, added in
// the order r+1, ..., r as on a CPU.
template <class E, class Rules, class Block, int P = 0>
class LocatedAllReduce : LocatedCall<E, Rules, Block, P> {
  using Base = LocatedCall<E, Rules, Block, P>;
  using Base::block_, Base::call_, Base::comm_, Base::exchange_, Base::peers_;
  using Base::input, Base::output, Base::part, Base::window;
  using typename Base::Parts;

 public:
  RINGREDUCE_DEVICE LocatedAllReduce(Block& block, Guard<Block>& guard, const DeviceComm& comm,
                                     const RankCall& call, const Location& location,
                                     PeerTensors& peers, int channel, int channels)
      : Base(block, guard, comm, call, location, peers, channel, channels,
             call.scatter ? Parts::kInput : Parts::kNone) {}

  RINGREDUCE_DEVICE void run() {
    this->inTurns(
        [&](uint64_t turn) {
          if (!this->input_is_mapped_) copyIn(turn, this->reads_window_);
        },
        [&](uint64_t turn) { add(turn); },
        [&](uint64_t turn) {
          this->copyOut(turn, !this->output_is_mapped_ && !call_.scatter, this->writes_window_);
        });
  }

 private:
  using Stored = AsStored<E>;

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
    bool own_alone;
    static constexpr int kCount = P;
    RINGREDUCE_DEVICE int count() const { return own_alone ? 1 : P > 0 ? P : size; }
    // From this rank on, so that not all write to the same one at a time.
    RINGREDUCE_DEVICE std::byte* operator()(int i) const {
      const int all = P > 0 ? P : size;
      return block.see(peers.output[rank + i < all ? rank + i : rank + i - all]);
    }
  };
  RINGREDUCE_DEVICE void add(uint64_t turn) const {
    Pass<E, Stored, Stored, Stored>::run(
        block_, part(turn, comm_.rank).size, Addends{block_, peers_, comm_.rank, exchange_.size()},
        Sums{block_, peers_, comm_.rank, exchange_.size(), call_.scatter}, arithmeticOf<P>(call_),
        true);
  }
};

// R is a Raw.
template <class R, class Rules, class Block>
class LocatedAllGather : LocatedCall<R, Rules, Block, 0> {
  using Base = LocatedCall<R, Rules, Block, 0>;
  using Base::block_, Base::comm_, Base::exchange_, Base::peers_;
  using Base::input, Base::part, Base::window;
  using typename Base::Parts;

 public:
  RINGREDUCE_DEVICE LocatedAllGather(Block& block, Guard<Block>& guard, const DeviceComm& comm,
                                     const RankCall& call, const Location& location,
                                     PeerTensors& peers, int channel, int channels)
      : Base(block, guard, comm, call, location, peers, channel, channels, Parts::kOutput) {}

  RINGREDUCE_DEVICE void run() {
    const int me = comm_.rank;
    this->inTurns(
        [&](uint64_t turn) {
          if (this->reads_window_)
            copyElements<R>(block_, part(turn, me).size, input(turn, me),
                            Spans<1>{{window(me, me)}});
        },
        [&](uint64_t turn) {
          const std::byte* from = block_.see(peers_.input[me]);
          const int peers = exchange_.size() - 1;
          const int sinks = peers + (block_.see(peers_.output[me]) != from);
          copyElements<R>(block_, part(turn, me).size, from,
                          Outputs{block_, peers_, exchange_, sinks});
        },
        [&](uint64_t turn) {
          this->copyOut(turn, !this->output_is_mapped_, this->writes_window_);
        });
  }

 private:
  // The peers' outputs, and then this rank's own unless the elements are there.
  struct Outputs {
    Block& block;
    const PeerTensors& tensors;
    const PushExchange<Rules, Block>& exchange;
    int sinks;
    static constexpr int kCount = 0;
    RINGREDUCE_DEVICE int count() const { return sinks; }
    RINGREDUCE_DEVICE std::byte* operator()(int i) const {
      return block.see(tensors.output[exchange.peer(i)]);
    }
  };
};

}  // namespace ringreduce::cuda
