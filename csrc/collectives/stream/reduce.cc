// Reduce over a mesh: the root gets everybody's addends and adds them where there is little, else
// the first half of the ring, whose results go to the root.
#include "algorithm/choose.h"
#include "base/copy.h"
#include "collectives/stream/calls.h"
#include "collectives/stream/direct_sum.h"
#include "collectives/stream/primitives.h"

namespace ringreduce {

void reduce(Mesh& mesh, const Reduce& r) {
  const int P = mesh.size();
  const size_t width = sizeOf(r.dtype), bytes = r.count * width;
  const bool root = mesh.rank() == r.root;
  const auto* input = static_cast<const std::byte*>(r.input);
  auto* output = root ? static_cast<std::byte*>(r.output) : nullptr;
  if (r.op == ReduceOp::kPremulSum) {  // the input is the caller's
    std::byte* scaled = mesh.scratch(bytes);
    scale(r.dtype, scaled, input, r.count, r.factor);
    input = scaled;
  }
  if (P == 1) {
    if (output != input) copyBytes(output, input, bytes);
    return;
  }
  const size_t partial = sizeOf(reduceKernels(r.dtype, r.op).partial);
  if (reducesByRing(bytes, r.count * partial, P, mesh.options().cost)) {
    const Cut cut{r.count, P};
    std::vector<RingChunk> chunks;
    for (int c = 0; c < P; ++c) {
      const size_t begin = cut.chunk(c).begin * width;
      chunks.push_back({input + begin, root ? output + begin : nullptr, cut.chunk(c).size});
    }
    return runMeshRing(mesh, {std::move(chunks), r.dtype, r.op, Ending::kRoot, r.root});
  }
  if (!root) return mesh.send(r.root, input, bytes);
  DirectSum sum(mesh, r.dtype, r.op, r.count, DirectSum::kByChunk);
  sum.expect();
  sum.run(input, output, [](Span) {});
}

}  // namespace ringreduce
