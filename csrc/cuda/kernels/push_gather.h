// All-gather and broadcast by push: a rank with data pushes it to all ranks at once.  One hop.
// Elements are moved as they are, so one kernel serves all dtypes of a width.
//
// In an all-gather every rank pushes, in a broadcast only the root.  The others post their steps
// too, which tells the root how far they have read (push.h).
//
// Pipelined: the next slice is pushed before this one is waited for.
//
// Bytes through device memory, all ranks on one GPU: of an all-gather of S in all parts
// (3P - 1) / P S a rank, S / P less in place; of a broadcast P S at the root and 2 S at the others.
#pragma once

#include "algorithm/cut.h"
#include "cuda/kernels/push.h"
#include "cuda/kernels/ring_kernel.h"

namespace ringreduce::cuda {

// R is a Raw.
template <class R, class Rules, class Block>
class Gather {
 public:
  RINGREDUCE_DEVICE Gather(Block& block, Guard<Block>& guard, const RankCall& call, int channel,
                           int channels)
      : block_(block),
        guard_(guard),
        call_(call),
        comm_(*call.comm),
        channel_(static_cast<size_t>(channel)),
        channels_(static_cast<size_t>(channels)),
        slices_(slicesOf(channel, channels, ceilDiv(call.count, call.slice))),
        exchange_(block, guard, comm_, channel),
        first_(exchange_.first(kResults)) {}

  RINGREDUCE_DEVICE void run() {
    if (slices_ == 0) return;
    give(0);
    for (size_t j = 0; j < slices_; ++j) {
      if (j + 1 < slices_) give(j + 1);
      if (!collect(j)) return;
    }
    exchange_.save(kResults, first_ + slices_);
  }

 private:
  using Exchange = PushExchange<Rules, Block>;
  static constexpr auto kResults = DeviceLayout::Of::kResults;
  static constexpr size_t kWidth = sizeof(typename R::Stored);

  // The peers' slots, and then this rank's own part of the output unless it is there.
  struct ToAll {
    const Exchange& exchange;
    uint64_t step;
    std::byte* mine;
    int peers, sinks;
    static constexpr int kCount = 0;
    RINGREDUCE_DEVICE int count() const { return sinks; }
    RINGREDUCE_DEVICE std::byte* operator()(int i) const {
      return i == peers ? mine : exchange.outgoing(kResults, step, exchange.peer(i));
    }
  };

  RINGREDUCE_DEVICE void give(size_t j) {
    if (guard_.failed()) return;
    if (gives(comm_.rank)) {
      const Span s = span(j);
      const std::byte* from = static_cast<const std::byte*>(call_.input) + s.begin * kWidth;
      std::byte* mine = output(comm_.rank, s);
      const int peers = comm_.size - 1;
      copyElements<R>(block_, s.size, from,
                      ToAll{exchange_, first_ + j, mine, peers, peers + (mine != from)});
    }
    exchange_.post(kResults, first_ + j);
  }

  RINGREDUCE_DEVICE bool collect(size_t j) {
    if (!exchange_.await(kResults, first_ + j)) return false;
    const Span s = span(j);
    for (int i = 0; i + 1 < comm_.size; ++i) {
      const int peer = exchange_.peer(i);
      if (gives(peer))
        copyElements<R>(block_, s.size, exchange_.incoming(kResults, first_ + j, peer),
                        Spans<1>{{output(peer, s)}});
    }
    return true;
  }

  RINGREDUCE_DEVICE bool gives(int rank) const {
    return call_.root == kEverybody || call_.root == rank;
  }
  RINGREDUCE_DEVICE Span span(size_t j) const {
    return piece(call_.count, call_.slice, j * channels_ + channel_);
  }
  // Where the elements of `rank` go.
  RINGREDUCE_DEVICE std::byte* output(int rank, Span s) const {
    const size_t part = call_.root == kEverybody ? static_cast<size_t>(rank) * call_.count : 0;
    return static_cast<std::byte*>(call_.output) + (part + s.begin) * kWidth;
  }

  Block& block_;
  Guard<Block>& guard_;
  const RankCall& call_;
  const DeviceComm& comm_;
  const size_t channel_, channels_, slices_;
  const Exchange exchange_;
  const uint64_t first_;
};

// ---- broadcast of long messages, in two hops
//
// A slice has a part for each rank.  A rank gets its part from the root and pushes it to all ranks,
// so the root sends little more than the message once.
//
// Two-shot's steps and pipeline (push_all_reduce.h), with nothing to add; ranks without data post
// their steps too.
//
// Bytes through device memory, all ranks on one GPU: (3P - 2) / P S a rank.

// R is a Raw.
template <class R, class Rules, class Block>
class TwoHopBroadcast {
 public:
  RINGREDUCE_DEVICE TwoHopBroadcast(Block& block, Guard<Block>& guard, const RankCall& call,
                                    int channel, int channels)
      : block_(block),
        guard_(guard),
        call_(call),
        comm_(*call.comm),
        channel_(static_cast<size_t>(channel)),
        channels_(static_cast<size_t>(channels)),
        slice_(call.slice * static_cast<size_t>(comm_.size)),
        slices_(slicesOf(channel, channels, ceilDiv(call.count, slice_))),
        exchange_(block, guard, comm_, channel),
        parts_(exchange_.first(kParts)),
        results_(exchange_.first(kResults)) {}

  RINGREDUCE_DEVICE void run() {
    if (slices_ == 0) return;
    give(0);
    for (size_t j = 0; j < slices_; ++j) {
      if (j + 1 < slices_) give(j + 1);
      if (!pass(j) || (j > 0 && !collect(j - 1))) return;
    }
    collect(slices_ - 1);
    exchange_.save(kParts, parts_ + slices_);
    exchange_.save(kResults, results_ + slices_);
  }

 private:
  using Exchange = PushExchange<Rules, Block>;
  static constexpr auto kParts = DeviceLayout::Of::kParts;
  static constexpr auto kResults = DeviceLayout::Of::kResults;
  static constexpr size_t kWidth = sizeof(typename R::Stored);

  RINGREDUCE_DEVICE bool isRoot() const { return comm_.rank == call_.root; }

  // Pushes slice j's parts to the ranks that forward them.
  RINGREDUCE_DEVICE void give(size_t j) {
    if (guard_.failed()) return;
    for (int i = 0; isRoot() && i + 1 < comm_.size; ++i) {
      const int peer = exchange_.peer(i);
      const Span theirs = part(j, peer);
      copyElements<R>(block_, theirs.size, data(theirs),
                      Spans<1>{{exchange_.outgoing(kParts, parts_ + j, peer)}});
    }
    exchange_.post(kParts, parts_ + j);
  }

  // All but the root, from this rank's next one on; this rank itself has its memory for it.
  struct ToOthers {
    const Exchange& exchange;
    uint64_t step;
    std::byte* mine;
    int rank, size, root;
    static constexpr int kCount = 0;
    RINGREDUCE_DEVICE int count() const { return size - 1; }
    RINGREDUCE_DEVICE std::byte* operator()(int i) const {
      const int after_root = (rank - root + size) % size;
      const int other = (root + 1 + (after_root + i) % (size - 1)) % size;
      return other == rank ? mine : exchange.outgoing(kResults, step, other);
    }
  };

  RINGREDUCE_DEVICE bool pass(size_t j) {
    if (!exchange_.await(kParts, parts_ + j)) return false;
    const Span mine = part(j, comm_.rank);
    const std::byte* from =
        isRoot() ? data(mine) : exchange_.incoming(kParts, parts_ + j, call_.root);
    copyElements<R>(
        block_, mine.size, from,
        ToOthers{exchange_, results_ + j, data(mine), comm_.rank, comm_.size, call_.root});
    exchange_.post(kResults, results_ + j);
    return true;
  }

  RINGREDUCE_DEVICE bool collect(size_t j) {
    if (!exchange_.await(kResults, results_ + j)) return false;
    for (int i = 0; !isRoot() && i + 1 < comm_.size; ++i) {
      const int peer = exchange_.peer(i);
      const Span theirs = part(j, peer);
      copyElements<R>(block_, theirs.size, exchange_.incoming(kResults, results_ + j, peer),
                      Spans<1>{{data(theirs)}});
    }
    return true;
  }

  // Rank p's part of this channel's slice j.
  RINGREDUCE_DEVICE Span part(size_t j, int p) const {
    const Span slice = piece(call_.count, slice_, j * channels_ + channel_);
    Span span = Cut{slice.size, comm_.size}.chunk(p);
    span.begin += slice.begin;
    return span;
  }
  // The root's elements, and the place for them at other ranks.
  RINGREDUCE_DEVICE std::byte* data(Span s) const {
    return static_cast<std::byte*>(call_.output) + s.begin * kWidth;
  }

  Block& block_;
  Guard<Block>& guard_;
  const RankCall& call_;
  const DeviceComm& comm_;
  const size_t channel_, channels_, slice_, slices_;
  const Exchange exchange_;
  const uint64_t parts_, results_;
};

}  // namespace ringreduce::cuda
