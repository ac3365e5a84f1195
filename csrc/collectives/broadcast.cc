// Broadcast.
//
// Shared memory: the root fills slots and the others copy them out.  The root waits only if it has
// no free slot, so it may be as many steps ahead as it has slots.  In a large message it fills the
// slots of all ranks, which have no use for theirs: where ranks share cores with other processes,
// each change of turns costs a time slice, so more bytes should be under way.  (Not in a group that
// goes on after losses: a rank that was lost may still write its own.)  The other ranks post their
// steps too, without data, so that each rank sees which ranks have arrived.  If all ranks' tensors
// are shared, rank r copies chunk r of the root's to all others. Streams: a binomial tree for small
// messages, otherwise a chain of all ranks, which pass each slice on as it comes.
#include <algorithm>

#include "algorithm/choose.h"
#include "algorithm/cut.h"
#include "base/bytes.h"
#include "base/stream_copy.h"
#include "collectives/collectives.h"
#include "collectives/stream_algorithms.h"

namespace ringreduce {

SharedData Broadcast::shared(int) const {
  return {data, count * sizeOf(dtype)};
}

void broadcast(OverMemory& c, const Broadcast& b) {
  if (c.size == 1) return;
  const auto chunk_by_chunk = [&](const std::vector<std::byte*>& data) {
    const size_t width = sizeOf(b.dtype);
    const Span chunk = Cut{b.count, c.size}.chunk(c.rank);
    const std::byte* const source = data[static_cast<size_t>(b.root)];
    const Copy copy = copyFor(b.count * width);
    const size_t end = chunk.end() * width;
    for (size_t at = chunk.begin * width; at < end; at += kTileBytes)
      for (int k = 1; k < c.size; ++k)
        copy(data[static_cast<size_t>((b.root + k) % c.size)] + at, source + at,
             std::min(kTileBytes, end - at));
  };
  if (inPlace(c, chunk_by_chunk)) return;
  Exchange& exchange = c.exchange;
  const size_t bytes = b.count * sizeOf(b.dtype), slot = exchange.slotBytes();
  constexpr size_t kLargeSlots = 64;
  const int filled = c.tensors && bytes >= kLargeSlots * slot ? c.size : 1;  // slots of a step
  const size_t step_bytes = static_cast<size_t>(filled) * slot;
  const uint64_t steps = std::max<uint64_t>(1, ceilDiv(bytes, step_bytes));
  const uint64_t first = exchange.begin(steps);
  for (uint64_t j = 0; j < steps; ++j) {
    const Span all = piece(bytes, step_bytes, j);
    const auto forEachSlot = [&](auto copy) {
      for (int k = 0; k < filled; ++k) {
        const Span s = piece(all.size, slot, static_cast<uint64_t>(k));
        copy(static_cast<std::byte*>(b.data) + all.begin + s.begin,
             exchange.slotOf((b.root + k) % c.size, first + j), s.size);
      }
    };
    if (c.rank == b.root) {
      exchange.acquire(first + j);
      forEachSlot([](std::byte* data, std::byte* there, size_t n) { copyBytes(there, data, n); });
      exchange.post(first + j);
    } else {
      exchange.post(first + j);
      exchange.peek(b.root, first + j);
      forEachSlot([](std::byte* data, std::byte* there, size_t n) { copyBytes(data, there, n); });
    }
    exchange.release(first + j);
  }
}

// ---- over streams

namespace {

void byTree(Transport& transport, int root, std::byte* data, size_t bytes) {
  const int P = transport.size(), place = (transport.rank() + P - root) % P;
  const auto rankAt = [&](int other) { return (other + root) % P; };
  // A place's parent is the place without its lowest bit; its children are those with one more bit
  // below that.
  int below = 1;
  while (below < P && !(place & below)) below *= 2;
  if (place != 0) {
    const int parent = rankAt(place - below);
    transport.expect(parent, data, bytes);
    transport.peek(parent);
    transport.release(parent);
  }
  for (below /= 2; below > 0; below /= 2)  // the largest subtree first
    if (place + below < P) transport.send(rankAt(place + below), data, bytes);
}

void byChain(Transport& transport, int root, std::byte* data, size_t bytes) {
  const int P = transport.size(), place = (transport.rank() + P - root) % P;
  const int next = (transport.rank() + 1) % P, previous = (transport.rank() + P - 1) % P;
  if (place == 0) return transport.send(next, data, bytes);
  const size_t slice = sliceBytes(bytes), slices = slicesOf(bytes, slice);
  for (size_t j = 0; j < slices; ++j) {
    const Span s = piece(bytes, slice, j);
    transport.expect(previous, data + s.begin, s.size);
  }
  for (size_t j = 0; j < slices; ++j) {
    const Span s = piece(bytes, slice, j);
    transport.peek(previous);
    transport.release(previous);
    if (place + 1 < P) transport.send(next, data + s.begin, s.size);
  }
}

}  // namespace

void broadcast(OverStreams& c, const Broadcast& b) {
  if (c.size == 1) return;
  const size_t bytes = b.count * sizeOf(b.dtype);
  auto* data = static_cast<std::byte*>(b.data);
  if (c.choose({Kind::kBroadcast, bytes}) == Algorithm::kChain)
    byChain(c.transport, b.root, data, bytes);
  else
    byTree(c.transport, b.root, data, bytes);
}

}  // namespace ringreduce
