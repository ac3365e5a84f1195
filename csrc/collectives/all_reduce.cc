// All-reduce.
//
// Shared memory: direct, two-shot (both reduction.h) or the ring; in place if all ranks' tensors
// are shared.
// Streams: four algorithms.  Bruck's all-gather and a sum on each rank; direct, which is the same
// in one hop; two-shot; the ring. All of them give the same bits.  In the order of ranks
// (algorithm/cut.h) the ring is not taken.
#include <algorithm>

#include "algorithm/choose.h"
#include "algorithm/cut.h"
#include "base/bytes.h"
#include "collectives/collectives.h"
#include "collectives/reduction.h"
#include "collectives/stream_algorithms.h"
#include "kernels/reduce.h"

namespace ringreduce {
namespace {

void ring(OverMemory& c, const AllReduce& a) {
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

SharedData AllReduce::shared(int) const {
  if (op == ReduceOp::kPremulSum) return {};  // it scales its input first
  return {data, count * sizeOf(dtype)};
}

void allReduce(OverMemory& c, const AllReduce& a) {
  const auto where_they_lie = [&](const std::vector<std::byte*>& data) {
    reduceInPlace(c, data, a.count, a.dtype, a.op, Reducible::kEverybody);
  };
  if (inPlace(c, where_they_lie)) return;  // all ranks' tensors lie in shared blocks
  if (a.op == ReduceOp::kPremulSum) scale(a.dtype, a.data, a.data, a.count, a.factor);
  if (c.size == 1) return;  // the reduction of one value is the value
  const Reducible reducible{a.data, a.data, a.count, a.dtype, a.op};
  c.way.algorithm = c.choose(
      {.kind = Kind::kAllReduce, .bytes = a.count * sizeOf(a.dtype), .wanted = c.algorithm});
  switch (c.way.algorithm) {
    case Algorithm::kTwoShot:
      return Reduction(c, reducible).twoShot();
    case Algorithm::kRing:
      return ring(c, a);
    default:
      return Reduction(c, reducible).direct();
  }
}

// ---- over streams

namespace {

std::vector<RingChunk> chunksOf(const AllReduce& a, int world_size) {
  const Cut cut{a.count, world_size};
  std::vector<RingChunk> chunks;
  for (int c = 0; c < world_size; ++c) {
    std::byte* const begin = static_cast<std::byte*>(a.data) + cut.chunk(c).begin * sizeOf(a.dtype);
    chunks.push_back({begin, begin, cut.chunk(c).size});
  }
  return chunks;
}

// Every rank gathers all inputs and adds them.  The sum overwrites this rank's input, which the
// transport may still be sending, so a copy of the input is sent.
void bruck(OverStreams& c, const AllReduce& a, int radix) {
  const auto P = static_cast<size_t>(c.size);
  const size_t width = sizeOf(a.dtype), bytes = a.count * width;
  std::byte* const all = c.scratch(P * bytes);
  copyBytes(all, a.data, bytes);
  Blocks blocks{.own = all, .places = {}, .bytes = std::vector<size_t>(P, bytes)};
  for (size_t x = 0; x < P; ++x) blocks.places.push_back(all + x * bytes);
  gatherByBruck(c.transport, blocks, radix);

  const ReduceKernels& kernels = reduceKernels(a.dtype, a.op);
  std::vector<const void*> ordered(P);
  Cut{a.count, c.size}.forEachChunk({0, a.count}, [&](int chunk, size_t begin, size_t n) {
    for (int k = 0; k < c.size; ++k) {
      const int r = c.kthToAdd(chunk, k);
      const auto x = static_cast<size_t>((r - c.rank + c.size) % c.size);
      ordered[static_cast<size_t>(k)] = all + x * bytes + begin * width;
    }
    kernels.reduce(static_cast<std::byte*>(a.data) + begin * width, ordered.data(), c.size, n,
                   c.size);
  });
}

// Each rank adds its chunk of all inputs and sends the sum to all ranks, slice by slice.  Sums
// arrive in memory whose inputs the transport may still be sending; stream_algorithms.h explains
// why that is safe.
void twoShot(OverStreams& c, const AllReduce& a) {
  const int P = c.size, me = c.rank;
  const size_t width = sizeOf(a.dtype);
  const std::vector<RingChunk> chunks = chunksOf(a, P);
  const RingChunk& mine = chunks[static_cast<size_t>(me)];
  DirectSum sum(c, a.dtype, a.op, mine.count, me);
  bool awaited = false;
  const auto forEachOther = [&](auto visit) {
    for (int k = 1; k < P; ++k) visit((me + k) % P, chunks[static_cast<size_t>((me + k) % P)]);
  };
  // From a rank its addends come first, then its sums.
  const auto await = [&] {
    if (awaited || !sum.expectsAll()) return;
    awaited = true;
    forEachOther([&](int r, const RingChunk& theirs) {
      c.transport.expect(r, theirs.output, theirs.count * width);
    });
  };
  sum.expect();
  await();
  forEachOther([&](int r, const RingChunk& theirs) {
    c.transport.send(r, theirs.input, theirs.count * width);
  });
  sum.run(mine.input, mine.output, [&](Span s) {
    await();
    forEachOther([&](int r, const RingChunk&) {
      c.transport.send(r, mine.output + s.begin * width, s.size * width);
    });
  });
  forEachOther([&](int r, const RingChunk&) {
    c.transport.peek(r);
    c.transport.release(r);
  });
}

}  // namespace

CallSize callSize(const AllReduce& a, Algorithm wanted) {
  return {.kind = Kind::kAllReduce,
          .bytes = a.count * sizeOf(a.dtype),
          .partial_bytes = a.count * sizeOf(reduceKernels(a.dtype, a.op).partial),
          .wanted = wanted};
}

void allReduce(OverStreams& c, const AllReduce& a) {
  if (a.op == ReduceOp::kPremulSum) scale(a.dtype, a.data, a.data, a.count, a.factor);
  const int P = c.size;
  if (P == 1) return;  // the reduction of one value is the value
  c.way.algorithm = c.choose(callSize(a, c.options.algorithm), a.count > 0);
  switch (c.way.algorithm) {
    case Algorithm::kBruck:
      return bruck(c, a, bruckRadix(P, c.options.cost));
    case Algorithm::kDirect:
      return bruck(c, a, P);
    case Algorithm::kTwoShot:
      return twoShot(c, a);
    default:
      return runStreamRing(c, {chunksOf(a, P), a.dtype, a.op, Ending::kEverybody});
  }
}

void allReduceSums(OverStreams& c, const SumsOfHosts& s) {
  const Cut cut{s.count, static_cast<int>(s.ranks.size())};
  const size_t wide = sizeOf(reduceKernels(s.dtype, s.op).partial), width = sizeOf(s.dtype);
  std::vector<RingChunk> chunks;
  for (int owner = 0; owner < cut.world_size; ++owner) {
    const Span chunk = cut.chunk(owner);
    std::byte* const sums = s.sums + chunk.begin * wide;
    chunks.push_back({sums, s.output + chunk.begin * width, chunk.size, sums});
  }
  runStreamRing(c, RingCall::ofSums(std::move(chunks), s.dtype, s.op, s.ranks, s.world_size,
                                    Ending::kEverybody));
}

}  // namespace ringreduce
