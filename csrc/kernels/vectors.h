// A block as vectors, for the loops of the codecs.  Only codec_kernels.cc includes this header and
// the headers that it is built on: all have internal linkage.
#pragma once

#include "kernels/block.h"
#include "kernels/half.h"

namespace ringreduce {
namespace {

using Ints = Vector<int32_t>;

struct Lanes {
  using Float = Floats;
  using Word = Words;
  using Int = Ints;
  RINGREDUCE_INLINE static Floats converted(Ints whole) {
    return __builtin_convertvector(whole, Floats);
  }
  RINGREDUCE_INLINE static Ints truncated(Floats value) {
    return __builtin_convertvector(value, Ints);
  }
};

constexpr int kLanes = kVectorBytes / sizeof(float);
constexpr int kVectors = codec::kBlock / kLanes;  // a block's: 2, 4 or 8

// The places in a block of vector k's elements.
RINGREDUCE_INLINE Words placesOf(int k) {
  Words places;
  for (int i = 0; i < kLanes; ++i) places[i] = static_cast<uint32_t>(k * kLanes + i);
  return places;
}

// By way of a variable of its own: a vector that is copied straight into an array may be copied in
// halves, and what is read behind two such stores waits for both.
RINGREDUCE_INLINE Floats loadOne(const char* from) {
  Floats one;
  __builtin_memcpy(&one, from, sizeof one);
  return one;
}
RINGREDUCE_INLINE void load(Floats* values, const char* from) {
  for (int k = 0; k < kVectors; ++k) values[k] = loadOne(from + k * kVectorBytes);
}

// Writes a block, or adds it to what is there.
template <bool kAdd>
RINGREDUCE_INLINE void put(char* to, int k, Floats values) {
  if constexpr (kAdd) values = loadOne(to + k * kVectorBytes) + values;
  __builtin_memcpy(to + k * kVectorBytes, &values, kVectorBytes);
}

// The greatest lane.
RINGREDUCE_INLINE int32_t greatestOf(Ints values) {
  typedef int32_t Four __attribute__((vector_size(16)));
  Four parts[kVectorBytes / 16];
  __builtin_memcpy(parts, &values, sizeof parts);
  Four most = parts[0];
  for (size_t k = 1; k < kVectorBytes / 16; ++k) most = most > parts[k] ? most : parts[k];
#if defined(__SSE4_1__)
  __m128i all = reinterpret_cast<__m128i>(most);
  all = _mm_max_epi32(all, _mm_shuffle_epi32(all, _MM_SHUFFLE(1, 0, 3, 2)));
  all = _mm_max_epi32(all, _mm_shuffle_epi32(all, _MM_SHUFFLE(2, 3, 0, 1)));
  return _mm_cvtsi128_si32(all);
#else
  const int32_t a = most[0] > most[1] ? most[0] : most[1];
  const int32_t b = most[2] > most[3] ? most[2] : most[3];
  return a > b ? a : b;
#endif
}

// --- Bytes ---------------------------------------------------------------------------------------

typedef int8_t Bytes __attribute__((vector_size(16)));  // half a block of codes
typedef uint8_t UnsignedBytes __attribute__((vector_size(16)));

RINGREDUCE_INLINE Bytes loadBytes(const void* from) {
  Bytes bytes;
  __builtin_memcpy(&bytes, from, sizeof bytes);
  return bytes;
}

RINGREDUCE_INLINE bool anyIn(Bytes bytes) {
  uint64_t halves[2];
  __builtin_memcpy(halves, &bytes, sizeof halves);
  return (halves[0] | halves[1]) != 0;
}

// What a decoder finds wrong: gathered, and looked at once at the end.
struct WrongBlocks {
  Bytes codes{};
  bool scales = false;
  bool any() const { return scales || anyIn(codes); }
};

// A vector's codes, from memory.
RINGREDUCE_INLINE Ints widenBytes(const void* from) {
#if defined(__AVX512BW__)
  const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(from));
  return reinterpret_cast<Ints>(_mm512_maskz_cvtepi8_epi32(kAll, bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(static_cast<const __m128i*>(from));
  return reinterpret_cast<Ints>(_mm256_cvtepi8_epi32(bytes));
#elif defined(__SSE4_1__)
  int32_t bytes;
  __builtin_memcpy(&bytes, from, sizeof bytes);
  return reinterpret_cast<Ints>(_mm_cvtepi8_epi32(_mm_cvtsi32_si128(bytes)));
#else
  typedef int8_t Few __attribute__((vector_size(kLanes)));
  Few bytes;
  __builtin_memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, Ints);
#endif
}

// A block's codes, to memory.
RINGREDUCE_INLINE void narrowBytes(void* to, const Ints* codes) {
#if defined(__AVX512BW__)
  __m128i* const halves = static_cast<__m128i*>(to);
  for (int k = 0; k < 2; ++k)
    _mm_storeu_si128(halves + k,
                     _mm512_maskz_cvtepi32_epi8(kAll, reinterpret_cast<__m512i>(codes[k])));
#elif defined(__AVX2__)
  const auto part = [&](int k) { return reinterpret_cast<__m256i>(codes[k]); };
  const __m256i mixed = _mm256_packs_epi16(_mm256_packs_epi32(part(0), part(1)),
                                           _mm256_packs_epi32(part(2), part(3)));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(static_cast<__m256i*>(to), _mm256_permutevar8x32_epi32(mixed, order));
#elif defined(__SSE4_1__)
  const auto part = [&](int k) { return reinterpret_cast<__m128i>(codes[k]); };
  for (int k = 0; k < 2; ++k)
    _mm_storeu_si128(static_cast<__m128i*>(to) + k,
                     _mm_packs_epi16(_mm_packs_epi32(part(4 * k), part(4 * k + 1)),
                                     _mm_packs_epi32(part(4 * k + 2), part(4 * k + 3))));
#else
  typedef int8_t Few __attribute__((vector_size(kLanes)));
  for (int k = 0; k < kVectors; ++k) {
    const Few bytes = __builtin_convertvector(codes[k], Few);
    __builtin_memcpy(static_cast<char*>(to) + k * kLanes, &bytes, sizeof bytes);
  }
#endif
}

}  // namespace
}  // namespace ringreduce
