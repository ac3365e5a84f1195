// How a message is cut for the way: fine enough that ranks send while they add, coarse enough that
// a slice costs little, and never more than a buffer of the transport's.
#pragma once

#include <algorithm>
#include <cstddef>

#include "algorithm/cut.h"
#include "transport/transport.h"

namespace ringreduce {

inline constexpr size_t kLeastSlice = 16 << 10;
inline constexpr size_t kSlicesWanted = 16;

// Elements of `width` bytes, of which `count` travel one after the other.  A multiple of
// kChunkElements.
constexpr size_t sliceElements(size_t count, size_t width) {
  const size_t bytes = std::clamp(ceilDiv(count * width, kSlicesWanted), kLeastSlice, kPieceBytes);
  return bytes / width / kChunkElements * kChunkElements;
}
static_assert(sliceElements(0, 16) > 0);

// The same for bytes that are only moved.
constexpr size_t sliceBytes(size_t bytes) {
  return sliceElements(bytes, 1);
}

// Even a message of no bytes has a slice: ranks meet.
constexpr size_t slicesOf(size_t count, size_t slice) {
  return std::max<size_t>(1, ceilDiv(count, slice));
}

}  // namespace ringreduce
