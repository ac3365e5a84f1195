// All-reduce by three algorithms, which give the same bits: direct, two-shot and ring.
#include <algorithm>

#include "algorithm/cut.h"
#include "collectives/collectives.h"
#include "collectives/host_primitives.h"
#include "collectives/reduction.h"
#include "kernels/reduce.h"

namespace ringreduce {
namespace {

void ring(Communicator& c, const AllReduce& a) {
  const ReduceKernels& kernels = reduceKernels(a.dtype, a.op);
  const size_t widest = std::max(sizeOf(kernels.partial), sizeOf(a.dtype));
  const size_t slice = c.link_slots.bytes / widest / kChunkElements * kChunkElements;
  HostPrimitives primitives(c, a, kernels, slice);
  const Cut cut{a.count, c.size};
  runRing(primitives, {.rank = c.rank,
                       .world_size = c.size,
                       .slices = std::max<size_t>(1, ceilDiv(cut.chunkSize(), slice)),
                       .window = static_cast<size_t>(c.link_slots.depth) / 2});
}

}  // namespace

void allReduce(Communicator& c, const AllReduce& a) {
  if (a.op == ReduceOp::kPremulSum) scale(a.dtype, a.data, a.data, a.count, a.factor);
  if (c.size == 1) return;  // the sum, the average, the least of one value is that value
  const Reducible reducible{a.data, a.data, a.count, a.dtype, a.op};
  switch (chooseAllReduce(a.count * sizeOf(a.dtype), c.size, c.algorithm)) {
    case Algorithm::kTwoShot:
      return Reduction(c, reducible).twoShot();
    case Algorithm::kRing:
      return ring(c, a);
    default:
      return Reduction(c, reducible).direct();
  }
}

}  // namespace ringreduce
