// Broadcast.
//
// Shared memory: the root fills slots and the others copy them out.  The root waits only if it has
// no free slot, so it may be as many steps ahead as it has slots.  The other ranks post their steps
// too, without data, so that each rank sees which ranks have arrived. Streams: a binomial tree for
// small messages, otherwise a chain of all ranks, which pass each slice on as it comes.
#include <algorithm>

#include "algorithm/choose.h"
#include "algorithm/cut.h"
#include "base/copy.h"
#include "collectives/collectives.h"
#include "collectives/stream_calls.h"
#include "collectives/stream_slices.h"

namespace ringreduce {

void broadcast(Communicator& c, const Broadcast& b) {
  if (c.size == 1) return;
  Exchange& exchange = c.exchange;
  const size_t bytes = b.count * sizeOf(b.dtype);
  const uint64_t slices = std::max<uint64_t>(1, ceilDiv(bytes, exchange.slotBytes()));
  const uint64_t first = exchange.begin(slices);
  for (uint64_t j = 0; j < slices; ++j) {
    const Span s = piece(bytes, exchange.slotBytes(), j);
    std::byte* there = static_cast<std::byte*>(b.data) + s.begin;
    if (c.rank == b.root) {
      copyBytes(exchange.acquire(first + j), there, s.size);
      exchange.post(first + j);
    } else {
      exchange.post(first + j);
      copyBytes(there, exchange.peek(b.root, first + j), s.size);
    }
    exchange.release(first + j);
  }
}

// ---- over streams

namespace {

void byTree(Mesh& mesh, int root, std::byte* data, size_t bytes) {
  const int P = mesh.size(), place = (mesh.rank() + P - root) % P;
  const auto rankAt = [&](int other) { return (other + root) % P; };
  // A place's parent is the place without its lowest bit; its children are those with one more bit
  // below that.
  int below = 1;
  while (below < P && !(place & below)) below *= 2;
  if (place != 0) {
    const int parent = rankAt(place - below);
    mesh.expect(parent, data, bytes);
    mesh.peek(parent);
    mesh.release(parent);
  }
  for (below /= 2; below > 0; below /= 2)  // the largest subtree first
    if (place + below < P) mesh.send(rankAt(place + below), data, bytes);
}

void byChain(Mesh& mesh, int root, std::byte* data, size_t bytes) {
  const int P = mesh.size(), place = (mesh.rank() + P - root) % P;
  const int next = (mesh.rank() + 1) % P, previous = (mesh.rank() + P - 1) % P;
  if (place == 0) return mesh.send(next, data, bytes);
  const size_t slice = sliceBytes(bytes), slices = slicesOf(bytes, slice);
  for (size_t j = 0; j < slices; ++j) {
    const Span s = piece(bytes, slice, j);
    mesh.expect(previous, data + s.begin, s.size);
  }
  for (size_t j = 0; j < slices; ++j) {
    const Span s = piece(bytes, slice, j);
    mesh.peek(previous);
    mesh.release(previous);
    if (place + 1 < P) mesh.send(next, data + s.begin, s.size);
  }
}

}  // namespace

void broadcast(Mesh& mesh, const Broadcast& b) {
  if (mesh.size() == 1) return;
  const size_t bytes = b.count * sizeOf(b.dtype);
  auto* data = static_cast<std::byte*>(b.data);
  if (broadcastsByChain(bytes, mesh.size(), mesh.options().cost))
    byChain(mesh, b.root, data, bytes);
  else
    byTree(mesh, b.root, data, bytes);
}

}  // namespace ringreduce
