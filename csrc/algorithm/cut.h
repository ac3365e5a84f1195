// Partitions a message.
//
// The canonical cut: P chunks of equal size, rounded up to 128 elements, the last ones shorter or
// empty.  Chunk c is owned by rank c and its elements are added in ring order: c+1, c+2, ..., c
// (mod P).  Every algorithm keeps this cut and this order, so an element's sum never depends on the
// algorithm, on pipelining or on the address of a buffer.  For transport a chunk, or the whole
// message, is cut again into slices that fit a slot; this does not change any result.
//
// In the order of ranks (RINGREDUCE_ORDER=rank) every element is added in the order 0, 1, ..., P-1.
// Then its sum does not depend on its place in the message either.  A ring cannot add so.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/bytes.h"

namespace ringreduce {

inline constexpr size_t kChunkElements = 128;

struct Span {
  size_t begin, size;
  constexpr size_t end() const { return begin + size; }
};

// Part `i` of [0, n), cut every `step` elements; empty beyond the end.
constexpr Span piece(size_t n, size_t step, size_t i) {
  const size_t begin = std::min(n, step * i);
  return {begin, std::min(step, n - begin)};
}

// Calls visit(i, begin, size) for each part of `span` that lies in one piece i of a range that is
// cut every `step` elements.
template <class Visit>
constexpr void forEachPiece(Span span, size_t step, Visit visit) {
  for (size_t at = span.begin; at < span.end();) {
    const size_t i = at / step;
    const size_t end = std::min(span.end(), (i + 1) * step);
    visit(static_cast<int>(i), at, end - at);
    at = end;
  }
}

struct Cut {
  size_t elements;
  int world_size;

  constexpr size_t chunkSize() const {
    return roundUp(ceilDiv(elements, static_cast<size_t>(world_size)), kChunkElements);
  }
  constexpr Span chunk(int c) const { return piece(elements, chunkSize(), static_cast<size_t>(c)); }
  // Slice j of a chunk that is cut every `step` elements; empty where this chunk is too short.
  constexpr Span slice(int c, size_t step, size_t j) const {
    const Span whole = chunk(c), s = piece(whole.size, step, j);
    return {whole.begin + s.begin, s.size};
  }
  // The chunk that holds element i (i < elements).
  constexpr int chunkOf(size_t i) const { return static_cast<int>(i / chunkSize()); }

  // Calls visit(c, begin, size) for each part of [begin, end) that lies in one chunk c.
  template <class Visit>
  constexpr void forEachChunk(Span span, Visit visit) const {
    forEachPiece(span, chunkSize(), visit);
  }
};

enum class AddOrder : uint8_t { kRing, kRank };

// The rank whose value is the k-th to be added in chunk c.
constexpr int kthToAdd(int c, int k, int world_size, AddOrder order = AddOrder::kRing) {
  const int ring = c + 1 + k;
  return order == AddOrder::kRank ? k : ring < world_size ? ring : ring - world_size;
}

static_assert(Cut{1000, 3}.chunkSize() == 384 && Cut{1000, 3}.chunk(2).size == 232);
static_assert(Cut{1, 4}.chunk(0).size == 1 && Cut{1, 4}.chunk(3).size == 0);

}  // namespace ringreduce
