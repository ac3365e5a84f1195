// Shared by host and device code: sizes, copies, hashes, and the mark of device functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

// Marks functions that are compiled for the host and for a GPU.
//
// nvcc compiles them for the GPU only, other compilers for the host.  No translation unit needs
// both, so __host__ __device__ is not needed, and nvcc sees no templates over host-only types.
#ifdef __CUDACC__
#define RINGREDUCE_DEVICE __device__
#define RINGREDUCE_UNROLL _Pragma("unroll")
#else
#define RINGREDUCE_DEVICE
#define RINGREDUCE_UNROLL
#endif

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
