// float16 and bfloat16 as elements: widened to float32 when loaded, rounded to nearest even when
// stored.  Only for *_kernels.cc (see tile.h).
//
// float16 uses conversion instructions where there are any (F16C, AVX-512, NEON), and integer
// arithmetic elsewhere.  All give the same bits for every input: subnormals are kept, too large
// values become infinite, and a NaN is made quiet and keeps its sign and the upper bits of its
// payload.
#pragma once

#include "kernels/tile.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace ringreduce {
namespace {

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
    return {(Floats)vcvt_f32_f16(half[0]), (Floats)vcvt_f32_f16(half[1])};
  }
  RINGREDUCE_INLINE static void store(char* to, Tile<float> tile) {
    const float16x4_t half[2] = {vcvt_f16_f32((float32x4_t)tile.lo),
                                 vcvt_f16_f32((float32x4_t)tile.hi)};
    __builtin_memcpy(to, half, sizeof half);
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
        __builtin_convertvector(reinterpret_cast<Vector<int32_t> >(magnitude), Floats) * 0x1p-24f);
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
