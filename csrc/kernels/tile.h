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

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

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

// ---- halves
//
// float16 and bfloat16 as elements: widened to float32 when loaded, rounded to nearest even when
// stored.
//
// float16 uses conversion instructions where there are any (F16C, AVX-512, NEON), and integer
// arithmetic elsewhere.  All give the same bits for every input: subnormals are kept, too large
// values become infinite, and a NaN is made quiet and keeps its sign and the upper bits of its
// payload.

using Words = Vector<uint32_t>;
using Floats = Vector<float>;

RINGREDUCE_INLINE Words bitsOf(Floats values) {
  return reinterpret_cast<Words>(values);
}
RINGREDUCE_INLINE Floats floatsOf(Words bits) {
  return reinterpret_cast<Floats>(bits);
}

// The sign bit is clear in all values compared here, so a signed comparison is correct; all
// instruction sets have one.
RINGREDUCE_INLINE Words select(Words a, uint32_t atLeast, Words then, Words otherwise) {
  using Signed = Vector<int32_t>;
  return reinterpret_cast<Signed>(a) >= static_cast<int32_t>(atLeast) ? then : otherwise;
}

#if defined(__AVX512BW__)
// Zero-masking intrinsics with a full mask equal the plain ones, in whose definitions GCC 12 warns
// of an uninitialised variable.
constexpr __mmask16 kAll = 0xffff;
#endif

// Loads 16-bit values, one into each 32-bit lane.
RINGREDUCE_INLINE Tile<uint32_t> load16(const char* from) {
  const char* const middle = from + kVectorBytes / 2;
#if defined(__AVX512BW__)
  const auto wide = [](const char* p) {
    return reinterpret_cast<Words>(
        _mm512_maskz_cvtepu16_epi32(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
  };
#elif defined(__AVX2__)
  const auto wide = [](const char* p) {
    return reinterpret_cast<Words>(
        _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  };
#elif defined(__SSE4_1__)
  const auto wide = [](const char* p) {
    return reinterpret_cast<Words>(
        _mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  };
#else
  const auto wide = [](const char* p) {
    typedef uint16_t Shorts __attribute__((vector_size(kVectorBytes / 2)));
    Shorts narrow;
    __builtin_memcpy(&narrow, p, sizeof narrow);
    return __builtin_convertvector(narrow, Words);
  };
#endif
  return {wide(from), wide(middle)};
}

// The reverse; no lane is above 0xffff.
RINGREDUCE_INLINE void store16(char* to, Tile<uint32_t> tile) {
#if defined(__AVX512BW__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_maskz_cvtepi32_epi16(kAll, reinterpret_cast<__m512i>(tile.lo)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + kVectorBytes / 2),
                      _mm512_maskz_cvtepi32_epi16(kAll, reinterpret_cast<__m512i>(tile.hi)));
#elif defined(__AVX2__)
  // The pack works within 128-bit halves and leaves the quarters in the order 0 2 1 3.
  const __m256i packed =
      _mm256_packus_epi32(reinterpret_cast<__m256i>(tile.lo), reinterpret_cast<__m256i>(tile.hi));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(packed, 0xd8));
#elif defined(__SSE4_1__)
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(to),
      _mm_packus_epi32(reinterpret_cast<__m128i>(tile.lo), reinterpret_cast<__m128i>(tile.hi)));
#else
  typedef uint16_t Shorts __attribute__((vector_size(kVectorBytes / 2)));
  const Shorts lo = __builtin_convertvector(tile.lo, Shorts);
  const Shorts hi = __builtin_convertvector(tile.hi, Shorts);
  __builtin_memcpy(to, &lo, sizeof lo);
  __builtin_memcpy(to + sizeof lo, &hi, sizeof hi);
#endif
}

// A bfloat16 is the upper half of a float32.
struct BFloat16 {
  using Lane = float;
  using Partial = Plain<float>;
  static constexpr size_t kBytes = 2;

  RINGREDUCE_INLINE static Tile<float> load(const char* from) {
    const Tile<uint32_t> bits = load16(from);
    return {floatsOf(bits.lo << 16), floatsOf(bits.hi << 16)};
  }

  RINGREDUCE_INLINE static void store(char* to, Tile<float> tile) {
    store16(to, {narrow(tile.lo), narrow(tile.hi)});
  }

 private:
  RINGREDUCE_INLINE static Words narrow(Floats values) {
    const Words bits = bitsOf(values);
    // Just below half a unit, plus the bit that must become even: a carry is a step up.
    const Words rounded = bits + 0x7fff + ((bits >> 16) & 1);
    // Rounding could carry a NaN into infinity, or further into the sign.
    return (values != values ? bits | 0x00400000 : rounded) >> 16;
  }
};

struct Float16 {
  using Lane = float;
  using Partial = Plain<float>;
  static constexpr size_t kBytes = 2;

#if defined(__AVX512BW__)
  RINGREDUCE_INLINE static Tile<float> load(const char* from) {
    const __m256i* p = reinterpret_cast<const __m256i*>(from);
    return {_mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(p)),
            _mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(p + 1))};
  }
  RINGREDUCE_INLINE static void store(char* to, Tile<float> tile) {
    constexpr int kNearestEven = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    __m256i* p = reinterpret_cast<__m256i*>(to);
    _mm256_storeu_si256(p, _mm512_maskz_cvtps_ph(kAll, tile.lo, kNearestEven));
    _mm256_storeu_si256(p + 1, _mm512_maskz_cvtps_ph(kAll, tile.hi, kNearestEven));
  }
#elif defined(__AVX2__) && defined(__F16C__)
  RINGREDUCE_INLINE static Tile<float> load(const char* from) {
    const __m128i* p = reinterpret_cast<const __m128i*>(from);
    return {_mm256_cvtph_ps(_mm_loadu_si128(p)), _mm256_cvtph_ps(_mm_loadu_si128(p + 1))};
  }
  RINGREDUCE_INLINE static void store(char* to, Tile<float> tile) {
    constexpr int kNearestEven = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    __m128i* p = reinterpret_cast<__m128i*>(to);
    _mm_storeu_si128(p, _mm256_cvtps_ph(tile.lo, kNearestEven));
    _mm_storeu_si128(p + 1, _mm256_cvtps_ph(tile.hi, kNearestEven));
  }
#elif defined(__aarch64__)
  RINGREDUCE_INLINE static Tile<float> load(const char* from) {
    float16x4_t half[2];
    __builtin_memcpy(half, from, sizeof half);
    return {converted(half[0]), converted(half[1])};
  }
  RINGREDUCE_INLINE static void store(char* to, Tile<float> tile) {
    const float16x4_t half[2] = {vcvt_f16_f32((float32x4_t)tile.lo),
                                 vcvt_f16_f32((float32x4_t)tile.hi)};
    __builtin_memcpy(to, half, sizeof half);
  }

 private:
  // Compilers fold the conversion to float32 and back into a copy, which keeps a signalling NaN as
  // it is.  They know nothing of what an asm does, even an empty one.
  RINGREDUCE_INLINE static Floats converted(float16x4_t half) {
    float32x4_t wide = vcvt_f32_f16(half);
    asm("" : "+w"(wide));
    return (Floats)wide;
  }
#else
  RINGREDUCE_INLINE static Tile<float> load(const char* from) {
    const Tile<uint32_t> bits = load16(from);
    return {widen(bits.lo), widen(bits.hi)};
  }
  RINGREDUCE_INLINE static void store(char* to, Tile<float> tile) {
    store16(to, {narrow(tile.lo), narrow(tile.hi)});
  }

 private:
  // float32 has 23 bits of mantissa and exponents biased by 127; float16 has 10, and 15.
  static constexpr int kShift = 13;
  static constexpr uint32_t kRebias = uint32_t{127 - 15} << 23;

  RINGREDUCE_INLINE static Floats widen(Words half) {
    const Words magnitude = half & 0x7fff;
    const Words normal = (magnitude << kShift) + kRebias;
    // 31 is the exponent of infinity and NaN there, 255 here: the bias once more.
    const Words infinite = normal + kRebias;
    const Words nan = infinite | 0x00400000;
    // A subnormal is its bits times 2^-24, exactly, and a normal float32, so that no mode that
    // flushes subnormals can touch it.
    const Words subnormal = bitsOf(
        __builtin_convertvector(reinterpret_cast<Vector<int32_t>>(magnitude), Floats) * 0x1p-24f);
    Words bits = select(magnitude, 0x0400, normal, subnormal);
    bits = select(magnitude, 0x7c00, infinite, bits);
    bits = select(magnitude, 0x7c01, nan, bits);
    return floatsOf(bits | (half & 0x8000) << 16);
  }

  RINGREDUCE_INLINE static Words narrow(Floats values) {
    const Words bits = bitsOf(values);
    const Words magnitude = bits & 0x7fffffff;
    // Just below half a unit, plus the bit that must become even: a carry is a step up, at the top
    // to infinity.
    const Words normal = (magnitude - kRebias + 0x0fff + ((magnitude >> kShift) & 1)) >> kShift;
    // The float32 unit of 0.5 is the unit of float16's subnormals, so adding 0.5 rounds to it.
    const Words subnormal = bitsOf(floatsOf(magnitude) + 0.5f) - 0x3f000000;
    const Words infinite = Words{} + 0x7c00;
    const Words nan = 0x7e00 | ((magnitude >> kShift) & 0x03ff);
    Words half = select(magnitude, 0x38800000, normal, subnormal);  // 2^-14
    half = select(magnitude, 0x47800000, infinite, half);           // 2^16
    half = select(magnitude, 0x7f800001, nan, half);
    return half | (bits >> 16 & 0x8000);
  }
#endif
};

}  // namespace
}  // namespace ringreduce
