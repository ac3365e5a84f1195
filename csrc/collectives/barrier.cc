// Barrier: a step of the exchange without data.
#include "collectives/collectives.h"

namespace ringreduce {

void barrier(Communicator& c, const Barrier&) {
  const uint64_t step = c.exchange.begin(1);
  c.exchange.post(step);
  for (int r = 0; r < c.size; ++r)
    if (r != c.rank) c.exchange.peek(r, step);
  c.exchange.release(step);
}

}  // namespace ringreduce
