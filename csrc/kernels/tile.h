// The unit that the reduction kernels work on: two vector registers of elements, and how to load
// and store them.  Only for kernels.cc, which is compiled once for every instruction set.
//
// Vectors are written out (the vector types that GCC and clang share) instead of left to the
// vectoriser, for three reasons.  A loop whose dst is also one of its sources stays vectorised,
// where a compiler's own check for overlap would send it to scalar code.  Pointers need no
// alignment.  And a loop over any number of sources keeps its sum in registers.
//
// Everything here has internal linkage.  An inline function that the linker merges with its twin in
// another file could otherwise bring AVX-512 code to a CPU that has none.
#pragma once

#ifndef RINGREDUCE_ISA
#error "for kernels.cc alone, which is compiled with RINGREDUCE_ISA set"
#endif

#include <cstddef>
#include <cstdint>

// A kernel is one loop over functions of a few instructions: a call left among them costs more than
// the work, and with 64-byte vectors goes through memory.
#define RINGREDUCE_INLINE [[gnu::always_inline]] inline

namespace ringreduce {
namespace {

#if defined(__AVX512BW__)
constexpr size_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr size_t kVectorBytes = 32;
#else
constexpr size_t kVectorBytes = 16;
#endif

template <class T>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kVectorBytes)));
};
template <class T>
using Vector = typename VectorOf<T>::Type;

// Two vectors, because two of float32 make one of float16 or bfloat16.
template <class T>
struct Tile {
  Vector<T> lo, hi;
};
template <class T>
constexpr size_t kTileLanes = 2 * kVectorBytes / sizeof(T);

// An "element" says how one element type is kept in memory, and in which type it is computed:
//   Lane      the type of a vector's lanes
//   kBytes    bytes an element in memory
//   Partial   the element that partial results are kept as
//   load, store: kTileLanes<Lane> elements from and to memory

// Computed as it is stored.  Integers are always the unsigned ones, whose arithmetic wraps by
// definition; an operation to which the sign matters says so itself.
template <class T>
struct Plain {
  using Lane = T;
  using Partial = Plain;
  static constexpr size_t kBytes = sizeof(T);

  RINGREDUCE_INLINE static Tile<T> load(const char* from) {
    Tile<T> tile;
    __builtin_memcpy(&tile.lo, from, kVectorBytes);
    __builtin_memcpy(&tile.hi, from + kVectorBytes, kVectorBytes);
    return tile;
  }

  RINGREDUCE_INLINE static void store(char* to, Tile<T> tile) {
    __builtin_memcpy(to, &tile.lo, kVectorBytes);
    __builtin_memcpy(to + kVectorBytes, &tile.hi, kVectorBytes);
  }
};

// A truth value: any byte but 0 counts as true when read, and true is written as 1.
struct Bool : Plain<uint8_t> {
  using Partial = Bool;

  RINGREDUCE_INLINE static Tile<uint8_t> load(const char* from) {
    const Tile<uint8_t> raw = Plain::load(from);
    return {truth(raw.lo), truth(raw.hi)};
  }

 private:
  RINGREDUCE_INLINE static Vector<uint8_t> truth(Vector<uint8_t> bytes) {
    return reinterpret_cast<Vector<uint8_t>>(bytes != 0) & 1;
  }
};

}  // namespace
}  // namespace ringreduce
