// Gather.
//
// Shared memory: all ranks but the root fill slots, and the root copies them out.
// Streams: each rank sends to the root, all at once.
#include <algorithm>

#include "algorithm/cut.h"
#include "base/bytes.h"
#include "collectives/collectives.h"
#include "collectives/over_streams.h"
#include "collectives/shared_memory.h"

namespace ringreduce {

void gather(OverMemory& c, const Gather& g) {
  Exchange& exchange = c.exchange;
  const size_t bytes = g.count * sizeOf(g.dtype);
  const auto* input = static_cast<const std::byte*>(g.input);
  const auto output = [&](int r) {
    return static_cast<std::byte*>(g.outputs[static_cast<size_t>(r)]);
  };
  const bool root = c.rank == g.root;
  const uint64_t slices = std::max<uint64_t>(1, ceilDiv(bytes, exchange.slotBytes()));
  const uint64_t first = exchange.begin(slices);
  const auto fill = [&](uint64_t j) {
    const Span s = piece(bytes, exchange.slotBytes(), j);
    if (!root) copyBytes(exchange.acquire(first + j), input + s.begin, s.size);
    exchange.post(first + j);
  };
  pipeline(exchange, slices, fill, [&](uint64_t j) {
    const Span s = piece(bytes, exchange.slotBytes(), j);
    if (root && output(c.rank) != input)
      copyBytes(output(c.rank) + s.begin, input + s.begin, s.size);
    for (int k = 1; k < c.size && root; ++k) {
      const int r = (c.rank + k) % c.size;
      copyBytes(output(r) + s.begin, exchange.peek(r, first + j), s.size);
    }
    exchange.release(first + j);
  });
}

// ---- over streams

void gather(OverStreams& c, const Gather& g) {
  const size_t bytes = g.count * sizeOf(g.dtype);
  if (c.rank != g.root) return c.transport.send(g.root, g.input, bytes);
  const auto output = [&](int r) { return g.outputs[static_cast<size_t>(r)]; };
  for (int r = 0; r < c.size; ++r)
    if (r != g.root) c.transport.expect(r, output(r), bytes);
  if (output(g.root) != g.input) copyBytes(output(g.root), g.input, bytes);
  for (int r = 0; r < c.size; ++r) {
    if (r == g.root) continue;
    c.transport.peek(r);
    c.transport.release(r);
  }
}

}  // namespace ringreduce
