// Scatter.
//
// Shared memory: the root shares its slots out, and each rank copies its part.
// Streams: the root sends to each rank, all at once.
#include <algorithm>

#include "algorithm/cut.h"
#include "base/bytes.h"
#include "collectives/collectives.h"
#include "collectives/over_streams.h"
#include "collectives/shared_memory.h"

namespace ringreduce {

void scatter(OverMemory& c, const Scatter& s) {
  Exchange& exchange = c.exchange;
  const size_t width = sizeOf(s.dtype);
  const Parts parts(c, width);
  const uint64_t slices = std::max<uint64_t>(1, ceilDiv(s.count, parts.elements()));
  const uint64_t first = exchange.begin(slices);
  const auto input = [&](int r) {
    return static_cast<const std::byte*>(s.inputs[static_cast<size_t>(r)]);
  };
  auto* output = static_cast<std::byte*>(s.output);
  for (uint64_t j = 0; j < slices; ++j) {
    const Span span = piece(s.count, parts.elements(), j);
    const size_t at = span.begin * width, bytes = span.size * width;
    if (c.rank == s.root) {
      std::byte* slot = exchange.acquire(first + j);
      for (int k = 1; k < c.size; ++k) {
        const int r = (c.rank + k) % c.size;
        copyBytes(parts.outgoing(slot, r), input(r) + at, bytes);
      }
      exchange.post(first + j);
      if (output != input(c.rank)) copyBytes(output + at, input(c.rank) + at, bytes);
    } else {
      exchange.post(first + j);
      copyBytes(output + at, parts.incoming(exchange.peek(s.root, first + j), s.root), bytes);
    }
    exchange.release(first + j);
  }
}

// ---- over streams

void scatter(OverStreams& c, const Scatter& s) {
  const size_t bytes = s.count * sizeOf(s.dtype);
  if (c.rank != s.root) {
    c.transport.expect(s.root, s.output, bytes);
    c.transport.peek(s.root);
    c.transport.release(s.root);
    return;
  }
  const auto input = [&](int r) { return s.inputs[static_cast<size_t>(r)]; };
  for (int k = 1; k < c.size; ++k) {
    const int r = (s.root + k) % c.size;
    c.transport.send(r, input(r), bytes);
  }
  if (s.output != input(s.root)) copyBytes(s.output, input(s.root), bytes);
}

}  // namespace ringreduce
