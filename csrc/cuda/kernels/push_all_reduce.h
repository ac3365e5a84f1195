// All-reduce by push, in one step and in two.
#pragma once

#include "algorithm/cut.h"
#include "cuda/kernels/push.h"
#include "cuda/kernels/ring_kernel.h"

namespace ringreduce::cuda {

// ---- one-shot
//
// Every rank pushes its whole message to every rank, and each adds all of them.  One hop, so the
// least latency; for small messages.
//
// Source: the one-shot algorithm of latency-bound GPU all-reduces (as in FasterTransformer and
// mscclpp), here with the canonical order of addition.
//
// Bytes through device memory, all ranks on one GPU: (2P + 1) S a rank.

// The peers' slots of a step.
template <class Rules, class Block, int P>
struct ToPeers {
  const PushExchange<Rules, Block, P>& exchange;
  uint64_t step;
  static constexpr int kCount = P > 0 ? P - 1 : 0;
  RINGREDUCE_DEVICE int count() const { return exchange.size() - 1; }
  RINGREDUCE_DEVICE std::byte* operator()(int i) const {
    return exchange.outgoing(DeviceLayout::Of::kParts, step, exchange.peer(i));
  }
};

template <class E, class Rules, int P, class Block>
RINGREDUCE_DEVICE void oneShot(Block& block, Guard<Block>& guard, const DeviceComm& comm,
                               const RankCall& call, int channel, int channels) {
  using Stored = AsStored<E>;
  using Exchange = PushExchange<Rules, Block, P>;
  constexpr auto kParts = DeviceLayout::Of::kParts;
  constexpr size_t kWidth = sizeof(typename E::Stored);
  const auto* input = static_cast<const std::byte*>(call.input);
  auto* output = static_cast<std::byte*>(call.output);
  Exchange exchange(block, guard, comm, channel);
  const auto arithmetic = arithmeticOf<P>(call);

  const size_t slices = slicesOf(channel, channels, ceilDiv(call.count, call.slice));
  if (slices == 0 || guard.failed()) return;  // else a barrier comes before the counter is saved
  RisingChunks chunks(Cut{call.count, exchange.size()}.chunkSize());
  uint64_t step = exchange.first(kParts);
  for (size_t j = 0; j < slices; ++j, ++step) {
    const size_t i = j * static_cast<size_t>(channels) + static_cast<size_t>(channel);
    const Span slice = piece(call.count, call.slice, i);
    const std::byte* mine = input + slice.begin * kWidth;
    // By packs of a sum: the eight of a copy, to seven peers, would take too many registers.
    Pass<E, Stored, Stored, Stored>::run(block, slice.size, ConstSpans<1>{{mine}, 0},
                                         ToPeers<Rules, Block, P>{exchange, step}, arithmetic,
                                         false);
    exchange.post(kParts, step);
    if (!exchange.await(kParts, step)) break;
    chunks.visit(slice, [&](int chunk, size_t begin, size_t size) {
      const size_t offset = (begin - slice.begin) * kWidth;
      const PushedAddends<Rules, Block, P> addends{exchange,      step,      offset,
                                                   mine + offset, comm.rank, chunk};
      Pass<E, Stored, Stored, Stored>::run(block, size, addends,
                                           Spans<1>{{output + begin * kWidth}}, arithmetic, true);
    });
  }
  exchange.save(kParts, step);
}

// ---- two-shot
//
// A slice has a part for each rank.  A rank gets all ranks' addends of its part, adds them, and
// pushes the result to all ranks.  Two hops for any number of ranks, and each byte crosses a wire
// as often as in a ring.
//
// Pipelined: a rank pushes the parts of the next slice before it waits for this one's, and collects
// the results of the last one after, so that each wait has had time.
//
// Bytes through device memory, all ranks on one GPU: (2 + 4 (P - 1) / P) S a rank.
//
// Reduce-scatter is its first half, by the same kernel: the parts are the message's own, of `count`
// elements each, and a rank keeps its sums.  Part r is one chunk, added in the order r+1, ..., r as
// on a CPU.  It moves (3P - 1) / P S, where S is the size of all parts.

template <class E, class Rules, class Block, int P = 0>
class TwoShot {
 public:
  RINGREDUCE_DEVICE TwoShot(Block& block, Guard<Block>& guard, const DeviceComm& comm,
                            const RankCall& call, int channel, int channels)
      : block_(block),
        guard_(guard),
        call_(call),
        comm_(comm),
        channel_(static_cast<size_t>(channel)),
        channels_(static_cast<size_t>(channels)),
        exchange_(block, guard, comm_, channel),
        slice_(call.scatter ? call.slice : call.slice * static_cast<size_t>(exchange_.size())),
        slices_(slicesOf(channel, channels, ceilDiv(call.count, slice_))),
        chunks_(call.scatter ? call.count : Cut{call.count, exchange_.size()}.chunkSize()),
        parts_(exchange_.first(kParts)),
        results_(exchange_.first(kResults)) {}

  RINGREDUCE_DEVICE void run() {
    if (slices_ == 0) return;
    give(0);
    for (size_t j = 0; j < slices_; ++j) {
      if (j + 1 < slices_) give(j + 1);
      if (!add(j) || (j > 0 && !call_.scatter && !collect(j - 1))) return;
    }
    exchange_.save(kParts, parts_ + slices_);
    if (call_.scatter) return;
    collect(slices_ - 1);
    exchange_.save(kResults, results_ + slices_);
  }

 private:
  using Stored = AsStored<E>;
  using Exchange = PushExchange<Rules, Block, P>;
  static constexpr auto kParts = DeviceLayout::Of::kParts;
  static constexpr auto kResults = DeviceLayout::Of::kResults;
  static constexpr size_t kWidth = sizeof(typename E::Stored);

  // Pushes slice j's inputs to the ranks that add them.
  RINGREDUCE_DEVICE void give(size_t j) {
    if (guard_.failed()) return;
    for (int i = 0; i + 1 < exchange_.size(); ++i) {
      const int peer = exchange_.peer(i);
      const Span theirs = part(j, peer);
      const Spans<1> there{{exchange_.outgoing(kParts, parts_ + j, peer)}};
      if constexpr (P > 0)
        copyElements<E>(block_, theirs.size, input(theirs.begin), there);
      else
        Pass<E, Stored, Stored, Stored>::run(block_, theirs.size,
                                             ConstSpans<1>{{input(theirs.begin)}, 0}, there,
                                             call_.arithmetic, false);
    }
    exchange_.post(kParts, parts_ + j);
  }

  // This rank's output first, then the peers' slots.
  struct ToAll {
    const Exchange& exchange;
    uint64_t step;
    size_t offset;
    std::byte* mine;
    int sinks;
    static constexpr int kCount = P;
    RINGREDUCE_DEVICE int count() const { return sinks; }
    RINGREDUCE_DEVICE std::byte* operator()(int i) const {
      if (i == 0) return mine;
      return exchange.outgoing(kResults, step, exchange.peer(i - 1)) + offset;
    }
  };

  RINGREDUCE_DEVICE bool add(size_t j) {
    if (!exchange_.await(kParts, parts_ + j)) return false;
    const Span mine = part(j, comm_.rank);
    // The output of a reduce-scatter is this rank's part alone.
    const size_t first = call_.scatter ? static_cast<size_t>(comm_.rank) * call_.count : 0;
    chunks_.visit(mine, [&](int chunk, size_t begin, size_t size) {
      const size_t offset = (begin - mine.begin) * kWidth;
      const PushedAddends<Rules, Block, P> addends{exchange_,    parts_ + j, offset,
                                                   input(begin), comm_.rank, chunk};
      const ToAll all{exchange_, results_ + j, offset, output(begin - first),
                      call_.scatter ? 1 : exchange_.size()};
      Pass<E, Stored, Stored, Stored>::run(block_, size, addends, all, arithmeticOf<P>(call_),
                                           true);
    });
    if (!call_.scatter) exchange_.post(kResults, results_ + j);
    return true;
  }

  RINGREDUCE_DEVICE bool collect(size_t j) {
    if (!exchange_.await(kResults, results_ + j)) return false;
    for (int i = 0; i + 1 < exchange_.size(); ++i) {
      const int peer = exchange_.peer(i);
      const Span theirs = part(j, peer);
      copyElements<E>(block_, theirs.size, exchange_.incoming(kResults, results_ + j, peer),
                      Spans<1>{{output(theirs.begin)}});
    }
    return true;
  }

  // Rank p's part of this channel's slice j.
  RINGREDUCE_DEVICE Span part(size_t j, int p) const {
    const Span slice = piece(call_.count, slice_, j * channels_ + channel_);
    if (call_.scatter) return {static_cast<size_t>(p) * call_.count + slice.begin, slice.size};
    // A division for the last slice only.
    const size_t each =
        slice.size == slice_ ? call_.slice : Cut{slice.size, exchange_.size()}.chunkSize();
    Span span = piece(slice.size, each, static_cast<size_t>(p));
    span.begin += slice.begin;
    return span;
  }
  RINGREDUCE_DEVICE const std::byte* input(size_t element) const {
    return static_cast<const std::byte*>(call_.input) + element * kWidth;
  }
  RINGREDUCE_DEVICE std::byte* output(size_t element) const {
    return static_cast<std::byte*>(call_.output) + element * kWidth;
  }

  Block& block_;
  Guard<Block>& guard_;
  const RankCall& call_;
  const DeviceComm& comm_;
  const size_t channel_, channels_;
  const Exchange exchange_;
  const size_t slice_, slices_;
  RisingChunks chunks_;
  const uint64_t parts_, results_;
};

}  // namespace ringreduce::cuda
