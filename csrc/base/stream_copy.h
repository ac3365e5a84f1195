// Copies that do not read the lines which they write.
//
// A store to a line that is in no cache fetches the line from memory first, so a copy of what
// caches cannot hold moves three bytes for each byte copied.  Non-temporal stores write whole lines
// to memory and move two.  What they wrote is in no cache afterwards: they are for outputs that are
// too large to be found there anyway, and lose where a line was read just before, as in a reduction
// in place.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bytes.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace ringreduce {

// Messages from which outputs are written past the caches (docs/performance.md has measurements).
inline constexpr size_t kStreamedBytes = 8 << 20;
// Where a copy or a sum goes to several places it goes tile by tile: a tile stays in the first
// cache from its first use to its last.
inline constexpr size_t kTileBytes = 16 << 10;

// copyBytes by non-temporal stores.  Other threads may see later stores before these bytes, until
// streamFence.  AArch64's memcpy does so by itself: its cores notice that whole lines are written.
inline void streamBytes(void* dst, const void* src, size_t bytes) {
#if defined(__x86_64__)
  constexpr size_t kLineBytes = 64;
  auto* to = static_cast<std::byte*>(dst);
  const auto* from = static_cast<const std::byte*>(src);
  const size_t head = (kLineBytes - reinterpret_cast<uintptr_t>(dst) % kLineBytes) % kLineBytes;
  if (bytes >= head + kLineBytes) {
    copyBytes(to, from, head);
    to += head;
    from += head;
    bytes -= head;
    for (; bytes >= kLineBytes; bytes -= kLineBytes, to += kLineBytes, from += kLineBytes) {
      auto* const line = reinterpret_cast<__m128i*>(to);
      const auto* const source = reinterpret_cast<const __m128i*>(from);
      const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1),
                    c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
      _mm_stream_si128(line, a);
      _mm_stream_si128(line + 1, b);
      _mm_stream_si128(line + 2, c);
      _mm_stream_si128(line + 3, d);
    }
  }
  copyBytes(to, from, bytes);
#else
  copyBytes(dst, src, bytes);
#endif
}

// Follows streamBytes before other threads are told of the bytes.  Once for all tiles: a fence
// waits until all stores have reached memory.
inline void streamFence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

// The copy for the outputs of a message of so many bytes; it may be streamBytes.
using Copy = void (*)(void* dst, const void* src, size_t bytes);
inline Copy copyFor(size_t message_bytes) {
  return message_bytes >= kStreamedBytes ? streamBytes : copyBytes;
}

}  // namespace ringreduce
