// Reduce-scatter.
//
// Shared memory: each rank puts the others' parts into its slot, and adds its own part of all
// slots.  That moves the bytes which an all-reduce moves to get its sums, and no more.  If all
// ranks' inputs are shared, it adds its own part of them where they lie.
// Streams: for small messages each rank sends each other its part and adds what it receives;
// otherwise the first half of the ring.  Hosts of several ranks may use the hierarchy instead.
//
// Rank r's part is added in the order r+1, ..., r: an all-reduce whose chunks are these parts gives
// the same bits.  In the order of ranks (algorithm/cut.h) it is added in that, and the ring is not
// taken.
#include <algorithm>
#include <numeric>
#include <vector>

#include "algorithm/choose.h"
#include "algorithm/cut.h"
#include "base/bytes.h"
#include "base/stream_copy.h"
#include "collectives/collectives.h"
#include "collectives/shared_memory.h"
#include "collectives/stream_algorithms.h"
#include "kernels/reduce.h"

namespace ringreduce {
namespace {

// Adds up `sources` into partial sums.
void addUp(const ReduceKernels& kernels, std::byte* sum, const std::vector<const void*>& sources,
           size_t n) {
  kernels.widen(sum, sources[0], n);
  for (size_t k = 1; k < sources.size(); ++k) kernels.combine(sum, sum, sources[k], n);
}

void scatter(OverMemory& c, const ReduceScatter& r, bool sums) {
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

  const ReduceOp op = sums && r.op == ReduceOp::kAvg ? ReduceOp::kSum : r.op;
  const ReduceKernels& kernels = reduceKernels(r.dtype, op);
  const bool widens = sums && kernels.partial != r.dtype;
  const size_t output_width = widens ? sizeOf(kernels.partial) : width;
  const Parts parts(c, width);
  const size_t most = *std::max_element(r.counts.begin(), r.counts.end());
  const uint64_t slices = std::max<uint64_t>(1, ceilDiv(most, parts.elements()));
  const uint64_t first = c.exchange.begin(slices);
  std::vector<const void*> ordered(static_cast<size_t>(c.size));
  const AddOrder order = sums ? AddOrder::kRing : c.order;  // the hierarchy has an order of its own
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
      const int p = kthToAdd(c.rank, k, c.size, order);
      ordered[static_cast<size_t>(k)] =
          p == c.rank ? input(p, s.begin) : parts.incoming(c.exchange.peek(p, first + j), p);
    }
    std::byte* const output = static_cast<std::byte*>(r.output) + s.begin * output_width;
    if (widens)
      addUp(kernels, output, ordered, s.size);
    else
      kernels.reduce(output, ordered.data(), c.size, s.size, c.size);
    c.exchange.release(first + j);
  });
}

}  // namespace

SharedData ReduceScatter::shared(int) const {
  if (op == ReduceOp::kPremulSum) return {};  // it scales its inputs first
  return inOnePiece(inputs, counts, sizeOf(dtype));
}

void reduceScatter(OverMemory& c, const ReduceScatter& r) {
  const auto from_their_tensors = [&](const std::vector<std::byte*>& data) {
    const auto me = static_cast<size_t>(c.rank);
    const size_t width = sizeOf(r.dtype);
    const size_t before = std::accumulate(r.counts.begin(), r.counts.begin() + c.rank, size_t{0});
    std::vector<const void*> ordered(data.size());
    for (int k = 0; k < c.size; ++k)
      ordered[static_cast<size_t>(k)] =
          data[static_cast<size_t>(kthToAdd(c.rank, k, c.size, c.order))] + before * width;
    const ReduceKernels& kernels = reduceKernels(r.dtype, r.op);
    auto* output = static_cast<std::byte*>(r.output);
    if (callSize(r).bytes < kStreamedBytes || output == r.inputs[me])
      return kernels.reduce(output, ordered.data(), c.size, r.counts[me], c.size);
    alignas(kLine) std::byte sums[kTileBytes];
    const size_t most = kTileBytes / width;
    for (size_t left = r.counts[me], n = 0; left > 0; left -= n) {
      n = std::min(most, left);
      kernels.reduce(sums, ordered.data(), c.size, n, c.size);
      streamBytes(output, sums, n * width);
      output += n * width;
      for (const void*& source : ordered)
        source = static_cast<const std::byte*>(source) + n * width;
    }
  };
  if (inPlace(c, from_their_tensors)) return;
  scatter(c, r, /*sums=*/false);
}

void reduceScatterSums(OverMemory& c, const ReduceScatter& r) {
  scatter(c, r, /*sums=*/true);
}

// ---- over streams

CallSize callSize(const ReduceScatter& r) {
  const size_t total = std::accumulate(r.counts.begin(), r.counts.end(), size_t{0});
  return {Kind::kReduceScatter, total * sizeOf(r.dtype),
          total * sizeOf(reduceKernels(r.dtype, r.op).partial)};
}

void reduceScatter(OverStreams& c, const ReduceScatter& r) {
  const int P = c.size, me = c.rank;
  const size_t width = sizeOf(r.dtype);
  std::vector<RingChunk> parts;
  for (size_t p = 0; p < r.counts.size(); ++p)
    parts.push_back({static_cast<const std::byte*>(r.inputs[p]), nullptr, r.counts[p]});
  RingChunk& mine = parts[static_cast<size_t>(me)];
  mine.output = static_cast<std::byte*>(r.output);
  if (r.op == ReduceOp::kPremulSum) {  // the inputs are the caller's
    std::byte* scaled = c.scratch(callSize(r).bytes);
    for (RingChunk& part : parts) {
      scale(r.dtype, scaled, part.input, part.count, r.factor);
      part.input = scaled;
      scaled += part.count * width;
    }
  }
  if (P == 1) {
    if (mine.output != mine.input) copyBytes(mine.output, mine.input, mine.count * width);
    return;
  }
  const bool all_receive = std::ranges::find(r.counts, size_t{0}) == r.counts.end();
  if (c.choose(callSize(r), all_receive) == Algorithm::kRing)
    return runStreamRing(c, {std::move(parts), r.dtype, r.op, Ending::kOwner});

  DirectSum sum(c, r.dtype, r.op, mine.count, me);
  sum.expect();
  for (int k = 1; k < P; ++k) {
    const RingChunk& theirs = parts[static_cast<size_t>((me + k) % P)];
    c.transport.send((me + k) % P, theirs.input, theirs.count * width);
  }
  sum.run(mine.input, mine.output, [](Span) {});
}

}  // namespace ringreduce
