// Reduce: an all-reduce whose result one rank wants.  The same bits, less traffic.
#include <vector>

#include "base/copy.h"
#include "collectives/collectives.h"
#include "collectives/reduction.h"

namespace ringreduce {

void reduce(Communicator& c, const Reduce& r) {
  const size_t bytes = r.count * sizeOf(r.dtype);
  Reducible reducible{r.input, c.rank == r.root ? r.output : nullptr, r.count, r.dtype, r.op,
                      r.root};
  std::vector<std::byte> scaled;  // the input is the caller's
  if (r.op == ReduceOp::kPremulSum) {
    scaled.resize(bytes);
    scale(r.dtype, scaled.data(), r.input, r.count, r.factor);
    reducible.input = scaled.data();
  }
  if (c.size == 1) {
    if (r.output != reducible.input) copyBytes(r.output, reducible.input, bytes);
    return;
  }
  // The ring is all-reduce's alone: here it would carry the whole message to no end.
  if (chooseAllReduce(bytes, c.size, Algorithm::kAuto) == Algorithm::kTwoShot)
    Reduction(c, reducible).twoShot();
  else
    Reduction(c, reducible).direct();
}

}  // namespace ringreduce
