// Broadcast over the exchange: the root fills slots, everybody else copies them out.
//
// The root need not wait for anybody unless it runs out of slots, so it may be ahead of the others
// by that much.  The others post their steps as well, without data: so all can tell who has
// arrived.
#include <algorithm>

#include "algorithm/cut.h"
#include "base/copy.h"
#include "collectives/collectives.h"

namespace ringreduce {

void broadcast(Communicator& c, const Broadcast& b) {
  if (c.size == 1) return;
  Exchange& exchange = c.exchange;
  const size_t bytes = b.count * sizeOf(b.dtype);
  const uint64_t slices = std::max<uint64_t>(1, ceilDiv(bytes, exchange.slotBytes()));
  const uint64_t first = exchange.begin(slices);
  for (uint64_t j = 0; j < slices; ++j) {
    const Span s = piece(bytes, exchange.slotBytes(), j);
    std::byte* there = static_cast<std::byte*>(b.data) + s.begin;
    if (c.rank == b.root) {
      copyBytes(exchange.acquire(first + j), there, s.size);
      exchange.post(first + j);
    } else {
      exchange.post(first + j);
      copyBytes(there, exchange.peek(b.root, first + j), s.size);
    }
    exchange.release(first + j);
  }
}

}  // namespace ringreduce
