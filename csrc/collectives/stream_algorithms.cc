// All-gather by Bruck and by the ring.
#include "collectives/stream_algorithms.h"

#include <algorithm>

#include "algorithm/cut.h"

namespace ringreduce {
namespace {

// Calls visit(data, bytes) for the blocks first ... end-1, block x at `at(x)`: once for blocks that
// are contiguous in memory.
template <class At, class Visit>
void forEachRun(const std::vector<size_t>& sizes, size_t first, size_t end, At at, Visit visit) {
  for (size_t x = first; x < end;) {
    const auto data = at(x);
    size_t bytes = sizes[x++];
    while (x < end && at(x) == data + bytes) bytes += sizes[x++];
    visit(data, bytes);
  }
}

// Calls visit(offset, count) for the messages of step `near`: `count` blocks to the rank `offset`
// before this one.
template <class Visit>
void forEachMessage(size_t P, size_t near, size_t radix, Visit visit) {
  for (size_t i = 1; i < radix && i * near < P; ++i) visit(i * near, std::min(near, P - i * near));
}

}  // namespace

void gatherByBruck(Transport& transport, const Blocks& blocks, int radix_) {
  const auto P = static_cast<size_t>(transport.size()), radix = static_cast<size_t>(radix_);
  const auto rankAt = [&](size_t offset) {
    return static_cast<int>((static_cast<size_t>(transport.rank()) + offset) % P);
  };
  std::vector<size_t> expected(P);  // by offset: expectations
  for (size_t near = 1; near < P; near *= radix)
    forEachMessage(P, near, radix, [&](size_t offset, size_t count) {
      forEachRun(
          blocks.bytes, offset, offset + count, [&](size_t x) { return blocks.places[x]; },
          [&](std::byte* place, size_t bytes) {
            transport.expect(rankAt(offset), place, bytes);
            ++expected[offset];
          });
    });
  for (size_t near = 1; near < P; near *= radix) {
    forEachMessage(P, near, radix, [&](size_t offset, size_t count) {
      forEachRun(
          blocks.bytes, 0, count, [&](size_t x) { return blocks.at(x); },
          [&](const std::byte* data, size_t bytes) {
            transport.send(rankAt(P - offset), data, bytes);
          });
    });
    forEachMessage(P, near, radix, [&](size_t offset, size_t) {
      for (size_t i = 0; i < expected[offset]; ++i) {
        transport.peek(rankAt(offset));
        transport.release(rankAt(offset));
      }
    });
  }
}

void gatherByRing(Transport& transport, const Blocks& blocks) {
  const int P = transport.size(), next = (transport.rank() + 1) % P,
            previous = (transport.rank() + P - 1) % P;
  const auto forEachSlice = [&](size_t x, auto visit) {
    const size_t slice = sliceBytes(blocks.bytes[x]);
    for (size_t j = 0; j < slicesOf(blocks.bytes[x], slice); ++j)
      visit(piece(blocks.bytes[x], slice, j));
  };
  // The block of the rank before this one comes first.
  for (size_t x = blocks.bytes.size() - 1; x > 0; --x)
    forEachSlice(x,
                 [&](Span s) { transport.expect(previous, blocks.places[x] + s.begin, s.size); });
  transport.send(next, blocks.own, blocks.bytes[0]);
  for (size_t x = blocks.bytes.size() - 1; x > 0; --x)
    forEachSlice(x, [&](Span s) {
      transport.peek(previous);
      transport.release(previous);
      if (x > 1) transport.send(next, blocks.places[x] + s.begin, s.size);
    });
}

}  // namespace ringreduce
