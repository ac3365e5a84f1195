// Reduce-scatter over the exchange: each rank puts the others' parts into its slot, and adds its
// own part of everybody's.  It moves what an all-reduce moves on its way to the sum, and no more.
//
// Rank r's part is added in the order r+1, ..., r: an all-reduce whose chunks are these parts gives
// the same bits.
#include <algorithm>
#include <vector>

#include "base/copy.h"
#include "collective/collectives.h"
#include "collective/parts.h"
#include "collective/pipeline.h"
#include "plan/cut.h"
#include "reduce/reduce.h"

namespace ringreduce {

void reduceScatter(Communicator& c, const ReduceScatter& r) {
  const size_t width = sizeOf(r.dtype);
  const auto count = [&](int p) { return r.counts[static_cast<size_t>(p)]; };
  std::vector<const void*> inputs = r.inputs;
  std::vector<std::byte> scaled;  // the inputs are the caller's
  if (r.op == ReduceOp::kPremulSum) {
    size_t total = 0, at = 0;
    for (size_t n : r.counts) total += n;
    scaled.resize(total * width);
    for (int p = 0; p < c.size; at += count(p++) * width) {
      scale(r.dtype, scaled.data() + at, inputs[static_cast<size_t>(p)], count(p), r.factor);
      inputs[static_cast<size_t>(p)] = scaled.data() + at;
    }
  }
  const auto input = [&](int p, size_t element) {
    return static_cast<const std::byte*>(inputs[static_cast<size_t>(p)]) + element * width;
  };
  if (c.size == 1) {
    if (r.output != inputs[0]) copyBytes(r.output, inputs[0], count(0) * width);
    return;
  }

  const ReduceKernels& kernels = reduceKernels(r.dtype, r.op);
  const Parts parts(c, width);
  const size_t most = *std::max_element(r.counts.begin(), r.counts.end());
  const uint64_t slices = std::max<uint64_t>(1, ceilDiv(most, parts.elements()));
  const uint64_t first = c.exchange.begin(slices);
  std::vector<const void*> ordered(static_cast<size_t>(c.size));
  const auto fill = [&](uint64_t j) {
    std::byte* slot = c.exchange.acquire(first + j);
    for (int p = 0; p < c.size; ++p) {
      if (p == c.rank) continue;
      const Span s = piece(count(p), parts.elements(), j);
      copyBytes(parts.outgoing(slot, p), input(p, s.begin), s.size * width);
    }
    c.exchange.post(first + j);
  };
  pipeline(c.exchange, slices, fill, [&](uint64_t j) {
    const Span s = piece(count(c.rank), parts.elements(), j);
    for (int k = 0; k < c.size; ++k) {
      const int p = kthToAdd(c.rank, k, c.size);
      ordered[static_cast<size_t>(k)] =
          p == c.rank ? input(p, s.begin) : parts.incoming(c.exchange.peek(p, first + j), p);
    }
    kernels.reduce(static_cast<std::byte*>(r.output) + s.begin * width, ordered.data(), c.size,
                   s.size, c.size);
    c.exchange.release(first + j);
  });
}

}  // namespace ringreduce
