// All-gather.
//
// Shared memory: each rank fills its slots and copies those of all others out.  If all inputs are
// shared, it copies from there.  If all outputs are, and are large, it copies its own input to all
// of them: each input is then read from memory once, and not once by every rank.
// Streams: Bruck's algorithm for small messages, otherwise the ring, straight from and to the
// caller's memory.  Hosts of several ranks may use the hierarchy instead.
#include <algorithm>
#include <numeric>

#include "algorithm/choose.h"
#include "algorithm/cut.h"
#include "base/bytes.h"
#include "base/stream_copy.h"
#include "collectives/collectives.h"
#include "collectives/shared_memory.h"
#include "collectives/stream_algorithms.h"

namespace ringreduce {

void SparseAllReduce::reorder(const std::vector<int>& ranks) {
  gather.place = [ranks, whole = gather.place](const std::vector<size_t>& ordered) {
    std::vector<size_t> counts(ranks.size());
    for (size_t p = 0; p < ranks.size(); ++p) counts[static_cast<size_t>(ranks[p])] = ordered[p];
    std::vector<void*> outputs = whole(counts);
    reorderList(outputs, ranks);
    return outputs;
  };
}

// ---- over shared memory

SharedData AllGather::shared(int rank) const {
  SharedData all = inOnePiece(outputs, counts, sizeOf(dtype));
  all.is_output = all.bytes >= kStreamedBytes && SharedBlock::holding(all.data, all.bytes);
  if (all.is_output) return all;
  return {input, counts[static_cast<size_t>(rank)] * sizeOf(dtype)};
}

void allGather(OverMemory& c, const AllGather& a) {
  Exchange& exchange = c.exchange;
  const size_t width = sizeOf(a.dtype);
  const auto* input = static_cast<const std::byte*>(a.input);
  const auto output = [&](int r) {
    return static_cast<std::byte*>(a.outputs[static_cast<size_t>(r)]);
  };
  const auto slice = [&](int r, uint64_t j) {
    return piece(a.counts[static_cast<size_t>(r)] * width, exchange.slotBytes(), j);
  };
  if (c.size == 1) {
    if (output(0) != input) copyBytes(output(0), input, a.counts[0] * width);
    return;
  }
  const Copy copy = copyFor(callSize(a).bytes);
  const auto to_all_outputs = [&](const std::vector<std::byte*>& data) {
    const auto me = static_cast<size_t>(c.rank);
    const size_t place = std::accumulate(a.counts.begin(), a.counts.begin() + c.rank, size_t{0});
    const size_t bytes = a.counts[me] * width;
    for (size_t at = 0; at < bytes; at += kTileBytes)
      for (std::byte* const whole : data) {
        std::byte* const part = whole + place * width;
        if (part != input) copy(part + at, input + at, std::min(kTileBytes, bytes - at));
      }
  };
  const auto where_they_lie = [&](const std::vector<std::byte*>& data) {
    if (c.tensors->areOutputs()) return to_all_outputs(data);
    for (int k = 0; k < c.size; ++k) {
      const auto r = static_cast<size_t>((c.rank + k) % c.size);
      if (a.outputs[r] != data[r]) copy(a.outputs[r], data[r], a.counts[r] * width);
    }
  };
  if (inPlace(c, where_they_lie)) return;
  const size_t most = *std::max_element(a.counts.begin(), a.counts.end()) * width;
  const uint64_t slices = std::max<uint64_t>(1, ceilDiv(most, exchange.slotBytes()));
  const uint64_t first = exchange.begin(slices);
  const auto fill = [&](uint64_t j) {
    const Span s = slice(c.rank, j);
    copyBytes(exchange.acquire(first + j), input + s.begin, s.size);
    exchange.post(first + j);
    if (output(c.rank) != input) copyBytes(output(c.rank) + s.begin, input + s.begin, s.size);
  };
  pipeline(exchange, slices, fill, [&](uint64_t j) {
    for (int k = 1; k < c.size; ++k) {
      const int r = (c.rank + k) % c.size;
      const Span s = slice(r, j);
      copyBytes(output(r) + s.begin, exchange.peek(r, first + j), s.size);
    }
    exchange.release(first + j);
  });
}

void allGatherUnknown(OverMemory& c, const AllGatherUnknown& a) {
  const auto P = static_cast<size_t>(c.size);
  const uint64_t mine = a.count;
  std::vector<uint64_t> theirs(P);
  AllGather sizes{.input = &mine, .dtype = DType::kUInt64};
  for (uint64_t& size : theirs) sizes.outputs.push_back(&size);
  sizes.counts.assign(P, 1);
  allGather(c, sizes);
  const std::vector<size_t> counts(theirs.begin(), theirs.end());
  allGather(c, {.input = a.input, .outputs = a.place(counts), .counts = counts, .dtype = a.dtype});
}

// ---- over streams

CallSize callSize(const AllGather& a) {
  const size_t count = std::accumulate(a.counts.begin(), a.counts.end(), size_t{0});
  return {Kind::kAllGather, count * sizeOf(a.dtype)};
}

void allGather(OverStreams& c, const AllGather& a) {
  const auto P = static_cast<size_t>(c.size), me = static_cast<size_t>(c.rank);
  const size_t width = sizeOf(a.dtype);
  if (a.outputs[me] != a.input) copyBytes(a.outputs[me], a.input, a.counts[me] * width);
  if (P == 1) return;
  Blocks blocks{.own = static_cast<const std::byte*>(a.input), .places = {}, .bytes = {}};
  for (size_t x = 0; x < P; ++x) {
    blocks.places.push_back(static_cast<std::byte*>(a.outputs[(me + x) % P]));
    blocks.bytes.push_back(a.counts[(me + x) % P] * width);
  }
  const bool all_send = std::ranges::find(a.counts, size_t{0}) == a.counts.end();
  if (c.choose(callSize(a), all_send) == Algorithm::kRing)
    gatherByRing(c, blocks);
  else
    gatherByBruck(c.transport, blocks, bruckRadix(c.size, c.options.cost));
}

void allGatherUnknown(OverStreams& c, const AllGatherUnknown& a) {
  const auto P = static_cast<size_t>(c.size), me = static_cast<size_t>(c.rank);
  auto* counts = reinterpret_cast<uint64_t*>(c.scratch(P * sizeof(uint64_t)));
  counts[me] = a.count;
  AllGather sizes{.input = counts + me, .dtype = DType::kUInt64};
  for (size_t r = 0; r < P; ++r) sizes.outputs.push_back(counts + r);
  sizes.counts.assign(P, 1);
  allGather(c, sizes);
  const std::vector<size_t> all(counts, counts + P);
  allGather(c, {.input = a.input, .outputs = a.place(all), .counts = all, .dtype = a.dtype});
}

}  // namespace ringreduce
