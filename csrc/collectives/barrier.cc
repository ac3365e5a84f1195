// Barrier.
//
// Shared memory: a step of the exchange without data.
// Streams: in hop k a rank sends a byte to the rank 2^k after it, once the bytes of all earlier
// hops have arrived.  Source: Hensgen, Finkel and Manber, "Two algorithms for barrier
// synchronization" (1988).
#include "collectives/collectives.h"
#include "collectives/over_streams.h"

namespace ringreduce {

void barrier(OverMemory& c, const Barrier&) {
  const uint64_t step = c.exchange.begin(1);
  c.exchange.post(step);
  for (int r = 0; r < c.size; ++r)
    if (r != c.rank) c.exchange.find(r, step);  // lost ranks do not come
  c.exchange.release(step);
}

// ---- over streams

void barrier(OverStreams& c, const Barrier&) {
  static constexpr std::byte kHere{1};
  const int P = c.size;
  for (int distance = 1; distance < P; distance *= 2) {
    const int from = (c.rank + P - distance) % P;
    c.transport.expect(from, 1);
    c.transport.send((c.rank + distance) % P, &kHere, 1);
    c.transport.peek(from);
    c.transport.release(from);
  }
}

}  // namespace ringreduce
