// The size of slices in a stream: small enough that ranks send while they add, large enough that a
// slice costs little, and at most a buffer of the transport.
#pragma once

#include <algorithm>
#include <cstddef>

#include "algorithm/cut.h"
#include "transport/transport.h"

namespace ringreduce {

inline constexpr size_t kLeastSlice = 16 << 10;
inline constexpr size_t kSlicesWanted = 16;

// Elements of a slice, for a message of `count` elements of `width` bytes.  A multiple of
// kChunkElements.
constexpr size_t sliceElements(size_t count, size_t width) {
  const size_t bytes = std::clamp(ceilDiv(count * width, kSlicesWanted), kLeastSlice, kPieceBytes);
  return bytes / width / kChunkElements * kChunkElements;
}
static_assert(sliceElements(0, 16) > 0);

// The same for bytes that are not added.
constexpr size_t sliceBytes(size_t bytes) {
  return sliceElements(bytes, 1);
}

// Even an empty message has a slice, so that ranks compare signatures.
constexpr size_t slicesOf(size_t count, size_t slice) {
  return std::max<size_t>(1, ceilDiv(count, slice));
}

}  // namespace ringreduce
