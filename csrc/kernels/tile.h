// The unit of the reduction kernels: two vector registers of elements, and how to load and store
// them.  Only for *_kernels.cc, which are compiled once for every instruction set.
//
// Explicit vectors (types that GCC and clang share) have three advantages over the vectoriser.  A
// loop whose dst is one of its sources stays vectorised, where the compiler's check for overlap
// would choose scalar code.  Pointers need no alignment.  A loop over any number of sources keeps
// its sum in registers.
//
// Everything here has internal linkage.  Otherwise the linker could merge an inline function with
// its twin of another file, and AVX-512 code would run on a CPU without it.
#pragma once

#ifndef RINGREDUCE_ISA
#error "for *_kernels.cc alone, which are compiled with RINGREDUCE_ISA set"
#endif

#include <cstddef>
#include <cstdint>

// A kernel is one loop over functions of a few instructions: a call would cost more than the work,
// and would pass 64-byte vectors through memory.
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

// An "element" defines how an element type is stored, and the type of its arithmetic:
//   Lane      the type of a vector's lanes
//   kBytes    bytes an element in memory
//   Partial   the element of partial results
//   load, store: kTileLanes<Lane> elements from and to memory

// Computed in the stored type.  Integers are always unsigned, whose arithmetic wraps by definition;
// operations that depend on the sign convert.
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

// A truth value: any byte but 0 is read as true; true is written as 1.
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
