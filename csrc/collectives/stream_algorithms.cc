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

void gatherByRing(OverStreams& c, const Blocks& blocks) {
  const std::vector<int>& ranks = blocks.ranks;
  const int P = ranks.empty() ? c.size : static_cast<int>(ranks.size());
  const int me =
      ranks.empty() ? c.rank : static_cast<int>(std::ranges::find(ranks, c.rank) - ranks.begin());
  const auto rankAt = [&](int place) {
    return ranks.empty() ? place : ranks[static_cast<size_t>(place)];
  };
  const int next = rankAt((me + 1) % P), previous = rankAt((me + P - 1) % P);
  const auto forEachSlice = [&](size_t x, auto visit) {
    const size_t slice = sliceBytes(blocks.bytes[x]);
    for (size_t j = 0; j < slicesOf(blocks.bytes[x], slice); ++j)
      visit(piece(blocks.bytes[x], slice, j));
  };
  struct Slice {
    const std::byte* data;
    size_t bytes;
  };
  std::vector<Slice> sends;  // in this order
  forEachSlice(0, [&](Span s) { sends.push_back({blocks.own + s.begin, s.size}); });
  // Slice k that arrives is slice own + k that is sent, so the window is at most `own`.
  const size_t own = sends.size();
  size_t arrivals = 0;
  // The block of the rank before this one comes first; the next rank's own is not forwarded.
  for (size_t x = blocks.bytes.size() - 1; x > 0; --x)
    forEachSlice(x, [&](Span s) {
      c.transport.expect(previous, blocks.places[x] + s.begin, s.size);
      ++arrivals;
      if (x > 1) sends.push_back({blocks.places[x] + s.begin, s.size});
    });

  size_t sent = 0;
  const auto sendUpTo = [&](size_t end) {
    for (; sent < std::min(end, sends.size()); ++sent)
      c.transport.send(next, sends[sent].data, sends[sent].bytes);
  };
  const size_t window =
      streamWindow(own, sliceBytes(blocks.bytes[0]), P, Transport::kWindow, c.options.cost);
  sendUpTo(window);
  for (size_t k = 0; k < arrivals; ++k) {
    c.transport.peek(previous);
    c.transport.release(previous);
    sendUpTo(k + 1 + window);
  }
  sendUpTo(sends.size());
}

}  // namespace ringreduce
