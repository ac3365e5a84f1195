// Sizes, copies and hashes of a few bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ringreduce {

// Whole-number division and rounding up.
constexpr size_t ceilDiv(size_t a, size_t b) {
  return a / b + (a % b != 0);
}
constexpr size_t roundUp(size_t a, size_t b) {
  return ceilDiv(a, b) * b;
}

// memcpy that takes empty spans: a tensor of no elements may have a null pointer.
inline void copyBytes(void* dst, const void* src, size_t bytes) {
  if (bytes > 0) std::memcpy(dst, src, bytes);
}

// The hash of a list that goes on with `next`: enough to see that two lists differ.  (FNV-1a's
// mixing step, over whole words.)
constexpr uint64_t mixed(uint64_t hash, uint64_t next) {
  return (hash ^ next) * 0x100000001b3;
}

}  // namespace ringreduce
