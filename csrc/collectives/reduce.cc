// Reduce: an all-reduce whose result only one rank wants.  The same bits with less traffic.
//
// Shared memory: direct or two-shot (reduction.h); in place if all ranks' tensors are shared.
// Streams: for small messages the root receives all addends and adds them; otherwise the first half
// of the ring, whose results go to the root.  In the order of ranks (algorithm/cut.h) the root adds
// large messages too.
#include <vector>

#include "algorithm/choose.h"
#include "base/bytes.h"
#include "collectives/collectives.h"
#include "collectives/reduction.h"
#include "collectives/stream_algorithms.h"

namespace ringreduce {

SharedData Reduce::shared(int rank) const {
  // Another output of the root is no memory that peers could write to.
  if (op == ReduceOp::kPremulSum || (rank == root && output != input)) return {};
  return {input, count * sizeOf(dtype)};
}

void reduce(OverMemory& c, const Reduce& r) {
  const auto where_they_lie = [&](const std::vector<std::byte*>& data) {
    reduceInPlace(c, data, r.count, r.dtype, r.op, r.root);
  };
  if (inPlace(c, where_they_lie)) return;
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
  // Not the ring, which would carry the whole message to all ranks.
  if (c.choose({Kind::kReduce, bytes}) == Algorithm::kTwoShot)
    Reduction(c, reducible).twoShot();
  else
    Reduction(c, reducible).direct();
}

// ---- over streams

void reduce(OverStreams& c, const Reduce& r) {
  const int P = c.size;
  const size_t width = sizeOf(r.dtype), bytes = r.count * width;
  const bool root = c.rank == r.root;
  const auto* input = static_cast<const std::byte*>(r.input);
  auto* output = root ? static_cast<std::byte*>(r.output) : nullptr;
  if (r.op == ReduceOp::kPremulSum) {  // the input is the caller's
    std::byte* scaled = c.scratch(bytes);
    scale(r.dtype, scaled, input, r.count, r.factor);
    input = scaled;
  }
  if (P == 1) {
    if (output != input) copyBytes(output, input, bytes);
    return;
  }
  const size_t partial = sizeOf(reduceKernels(r.dtype, r.op).partial);
  if (c.choose({Kind::kReduce, bytes, r.count * partial}) == Algorithm::kRing) {
    const Cut cut{r.count, P};
    std::vector<RingChunk> chunks;
    for (int owner = 0; owner < P; ++owner) {
      const auto [first, count] = cut.chunk(owner);
      const size_t begin = first * width;
      chunks.push_back({input + begin, root ? output + begin : nullptr, count});
    }
    return runStreamRing(c, {std::move(chunks), r.dtype, r.op, Ending::kRoot, r.root});
  }
  if (!root) return c.transport.send(r.root, input, bytes);
  DirectSum sum(c, r.dtype, r.op, r.count, DirectSum::kByChunk);
  sum.expect();
  sum.run(input, output, [](Span) {});
}

}  // namespace ringreduce
