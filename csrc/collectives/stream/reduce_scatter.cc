// Reduce-scatter over a mesh: each rank sends each other its part and adds what it gets where there
// is little, else the first half of the ring.
//
// Rank r's part is added in the order r+1, ..., r: an all-reduce whose chunks are these parts gives
// the same bits.
#include <numeric>

#include "algorithm/choose.h"
#include "base/copy.h"
#include "collectives/stream/calls.h"
#include "collectives/stream/direct_sum.h"
#include "collectives/stream/primitives.h"

namespace ringreduce {

void reduceScatter(Mesh& mesh, const ReduceScatter& r) {
  const int P = mesh.size(), me = mesh.rank();
  const size_t width = sizeOf(r.dtype);
  const size_t total = std::accumulate(r.counts.begin(), r.counts.end(), size_t{0});
  std::vector<RingChunk> parts;
  for (size_t p = 0; p < r.counts.size(); ++p)
    parts.push_back({static_cast<const std::byte*>(r.inputs[p]), nullptr, r.counts[p]});
  RingChunk& mine = parts[static_cast<size_t>(me)];
  mine.output = static_cast<std::byte*>(r.output);
  if (r.op == ReduceOp::kPremulSum) {  // the inputs are the caller's
    std::byte* scaled = mesh.scratch(total * width);
    for (RingChunk& part : parts) {
      scale(r.dtype, scaled, part.input, part.count, r.factor);
      part.input = scaled;
      scaled += part.count * width;
    }
  }
  if (P == 1) {
    if (mine.output != mine.input) copyBytes(mine.output, mine.input, total * width);
    return;
  }
  const size_t partial = sizeOf(reduceKernels(r.dtype, r.op).partial);
  if (scattersByRing(total * width, total * partial, P, mesh.options().cost))
    return runMeshRing(mesh, {std::move(parts), r.dtype, r.op, Ending::kOwner});

  DirectSum sum(mesh, r.dtype, r.op, mine.count, me);
  sum.expect();
  for (int k = 1; k < P; ++k) {
    const RingChunk& theirs = parts[static_cast<size_t>((me + k) % P)];
    mesh.send((me + k) % P, theirs.input, theirs.count * width);
  }
  sum.run(mine.input, mine.output, [](Span) {});
}

}  // namespace ringreduce
