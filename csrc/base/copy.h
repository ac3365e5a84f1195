// memcpy that takes empty spans: a tensor of no elements may have a null pointer.
#pragma once

#include <cstddef>
#include <cstring>

namespace ringreduce {

inline void copyBytes(void* dst, const void* src, size_t bytes) {
  if (bytes > 0) std::memcpy(dst, src, bytes);
}

}  // namespace ringreduce
