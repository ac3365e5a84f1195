// All-gather over the exchange: everybody fills slots, everybody copies all of them out.
#include <algorithm>
#include <numeric>

#include "algorithm/cut.h"
#include "base/copy.h"
#include "collectives/collectives.h"
#include "collectives/pipeline.h"

namespace ringreduce {

void allGather(Communicator& c, const AllGather& a) {
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

void allGatherUnknown(Communicator& c, const AllGatherUnknown& a) {
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

}  // namespace ringreduce
