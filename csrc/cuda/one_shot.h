// All-reduce by one-shot push: everybody gives everybody its whole message, and each adds all of
// them up.  One hop, so the least latency; for small messages.
//
// Source: the one-shot algorithm of latency-bound GPU all-reduces (as in FasterTransformer and
// mscclpp), here with the canonical order of addition.
//
// Bytes through device memory, all ranks on one GPU: (2P + 1) S a rank.
#pragma once

#include "algorithm/cut.h"
#include "cuda/push.h"
#include "cuda/ring.h"

namespace ringreduce::cuda {

template <class E, class Rules, class Block>
RINGREDUCE_DEVICE void oneShot(Block& block, Guard<Block>& guard, const RankCall& call, int channel,
                               int channels) {
  using Stored = AsStored<E>;
  using Exchange = PushExchange<Rules, Block>;
  constexpr auto kParts = DeviceLayout::Of::kParts;
  constexpr size_t kWidth = sizeof(typename E::Stored);
  const DeviceComm& comm = *call.comm;
  const Cut cut{call.count, comm.size};
  const auto* input = static_cast<const std::byte*>(call.input);
  auto* output = static_cast<std::byte*>(call.output);
  Exchange exchange(block, guard, comm, channel);

  struct ToPeers {
    const Exchange& exchange;
    uint64_t step;
    int peers;
    RINGREDUCE_DEVICE int count() const { return peers; }
    RINGREDUCE_DEVICE std::byte* operator()(int i) const {
      return exchange.outgoing(kParts, step, exchange.peer(i));
    }
  };

  const size_t slices = slicesOf(channel, channels, ceilDiv(call.count, call.slice));
  if (slices == 0 || guard.failed()) return;  // else a barrier comes before the counter is saved
  uint64_t step = exchange.first(kParts);
  for (size_t j = 0; j < slices; ++j, ++step) {
    const size_t i = j * static_cast<size_t>(channels) + static_cast<size_t>(channel);
    const Span slice = piece(call.count, call.slice, i);
    const std::byte* mine = input + slice.begin * kWidth;
    Pass<E, Stored, Stored, Stored>::run(block, slice.size, ConstSpans<1>{{mine}, 0},
                                         ToPeers{exchange, step, comm.size - 1}, call.arithmetic,
                                         false);
    exchange.post(kParts, step);
    if (!exchange.await(kParts, step)) break;
    cut.forEachChunk(slice, [&](int chunk, size_t begin, size_t size) {
      const size_t offset = (begin - slice.begin) * kWidth;
      const PushedAddends<Rules, Block> addends{exchange,  step,      offset, mine + offset,
                                                comm.rank, comm.size, chunk};
      Pass<E, Stored, Stored, Stored>::run(
          block, size, addends, Spans<1>{{output + begin * kWidth}}, call.arithmetic, true);
    });
  }
  exchange.save(kParts, step);
}

}  // namespace ringreduce::cuda
