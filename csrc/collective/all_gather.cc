// All-gather over the exchange: everybody fills slots, everybody copies all of them out.
#include <algorithm>

#include "base/copy.h"
#include "collective/collectives.h"
#include "plan/cut.h"

namespace ringreduce {

void allGather(Communicator& c, const AllGather& a) {
  Exchange& exchange = c.exchange;
  const size_t bytes = a.count * sizeOf(a.dtype);
  const auto* input = static_cast<const std::byte*>(a.input);
  const auto output = [&](int r) {
    return static_cast<std::byte*>(a.outputs[static_cast<size_t>(r)]);
  };
  const auto keepOwn = [&](Span s) {
    if (output(c.rank) != input) copyBytes(output(c.rank) + s.begin, input + s.begin, s.size);
  };
  if (c.size == 1) return keepOwn({0, bytes});

  const uint64_t slices = std::max<uint64_t>(1, ceilDiv(bytes, exchange.slotBytes()));
  const uint64_t first = exchange.begin(slices);
  const auto fill = [&](uint64_t j) {
    const Span s = piece(bytes, exchange.slotBytes(), j);
    copyBytes(exchange.acquire(first + j), input + s.begin, s.size);
    exchange.post(first + j);
    keepOwn(s);
  };
  fill(0);
  for (uint64_t j = 0; j < slices; ++j) {
    if (j + 1 < slices) fill(j + 1);  // one ahead, so that peers find it there
    const Span s = piece(bytes, exchange.slotBytes(), j);
    for (int k = 1; k < c.size; ++k) {
      const int r = (c.rank + k) % c.size;
      copyBytes(output(r) + s.begin, exchange.peek(r, first + j), s.size);
    }
    exchange.release(first + j);
  }
}

}  // namespace ringreduce
