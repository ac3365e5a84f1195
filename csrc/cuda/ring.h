// All-reduce by ring on a GPU: algorithm/ring.h's schedule, run by each channel's block on its
// slices.
//
// Bytes through device memory, all ranks on one GPU, for a message of S bytes and P ranks: a rank's
// blocks read and write (6P - 4) / P of S.  Addends travel as `Value`: where that is w times as
// wide as the dtype, they add 2 (P - 1) / P (w - 1) S.
#pragma once

#include "cuda/primitives.h"

namespace ringreduce::cuda {

// How many of `slices` one of `channels` has, when they are dealt out in turn.
constexpr size_t slicesOf(int channel, int channels, size_t slices) {
  const auto c = static_cast<size_t>(channel), n = static_cast<size_t>(channels);
  return slices <= c ? 0 : ceilDiv(slices - c, n);
}
static_assert(slicesOf(0, 4, 5) == 2 && slicesOf(1, 4, 5) == 1 && slicesOf(3, 4, 3) == 0);

template <class E, class Rules, class Block,
          template <class, class, class> class Primitives = DevicePrimitives>
RINGREDUCE_DEVICE void ring(Block& block, Guard<Block>& guard, const RankCall& call, int channel,
                            int channels) {
  const Cut cut{call.count, call.comm->size};
  const size_t slices = slicesOf(channel, channels, ceilDiv(cut.chunkSize(), call.slice));
  if (slices == 0) return;  // no barrier between the reading of the counters and their saving
  Primitives<E, Rules, Block> primitives(block, guard, call, channel, channels);
  runRing(primitives, {.rank = call.comm->rank,
                       .world_size = call.comm->size,
                       .slices = slices,
                       .window = call.window});
  primitives.save();
}

}  // namespace ringreduce::cuda
