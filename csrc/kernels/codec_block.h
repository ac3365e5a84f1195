// The parts that all codecs share: bits and floats, random numbers, codes, the scale of a block,
// and the block as vectors.  The functions are templates on lanes, whose Float, Word and Int are
// vectors or single numbers.
//
// Everything is always inlined: codec_kernels.cc is compiled once for each instruction set, and the
// linker must not merge a function of one set with its twin of another.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bytes.h"
#include "kernels/codec.h"

#ifdef __CUDACC__
#define RINGREDUCE_CODING RINGREDUCE_DEVICE __forceinline__
#else
#define RINGREDUCE_CODING [[gnu::always_inline]] inline
#endif

namespace ringreduce::codec {

// Lanes that are single numbers.
struct Single {
  using Float = float;
  using Word = uint32_t;
  using Int = int32_t;
  RINGREDUCE_CODING static Float converted(Int whole) { return static_cast<float>(whole); }
  RINGREDUCE_CODING static Int truncated(Float value) { return static_cast<int32_t>(value); }
};

constexpr int kBlock = static_cast<int>(kCodecBlock);
constexpr uint32_t kSign = 0x80000000, kMagnitude = 0x7fffffff, kInfinity = 0x7f800000;

// The same bits as another type.
template <class To, class From>
RINGREDUCE_CODING To as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

// a < b ? then : otherwise, for words below 2^31, which all instruction sets compare as signed.
template <class L>
RINGREDUCE_CODING typename L::Word ifBelow(typename L::Word a, int32_t b, typename L::Word then,
                                           typename L::Word otherwise) {
  return as<typename L::Int>(a) < b ? then : otherwise;
}

// --- Random numbers ------------------------------------------------------------------------------

// The key of a block.  The numbers of its elements derive from it with 32-bit arithmetic, which all
// vectors have.
RINGREDUCE_CODING uint64_t keyOf(uint64_t seed, uint64_t block) {
  uint64_t x = seed + (block + 1) * 0x9e3779b97f4a7c15;
  x = (x ^ x >> 32) * 0xd6e8feb86659fd93;
  x = (x ^ x >> 32) * 0xd6e8feb86659fd93;
  return x ^ x >> 32;
}

// 32 random bits for each of the elements of a block at `places`.
template <class L>
RINGREDUCE_CODING typename L::Word drawn(uint64_t key, typename L::Word places) {
  const uint32_t low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
  typename L::Word x = places * 0x9e3779b9u + low;
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13) ^ high) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

// Between 0 and 1, in steps of 2^-bits and half a step off 0: added to a whole number it does not
// reach the next one.
template <class L, int kBits>
RINGREDUCE_CODING typename L::Float part(typename L::Word random) {
  constexpr float kStep = 1.f / (1 << kBits);
  return L::converted(as<typename L::Int>(random >> (32 - kBits))) * kStep + kStep / 2;
}

// --- Codes ---------------------------------------------------------------------------------------

// To nearest, ties to even: 1.5 * 2^23 leaves whole numbers in the last places.
template <class L>
RINGREDUCE_CODING typename L::Int nearest(typename L::Float scaled) {
  constexpr float kWhole = 0x1.8p23f;
  return as<typename L::Int>(scaled + kWhole) - 0x4b400000;
}

// Rounds up with the probability of the fraction; a whole number stays as it is.
template <class L>
RINGREDUCE_CODING typename L::Int atRandom(typename L::Float scaled, typename L::Word random) {
  const typename L::Float moved = scaled + part<L, 16>(random);  // exact for whole numbers
  const typename L::Int towards_zero = L::truncated(moved);
  return L::converted(towards_zero) > moved ? towards_zero - 1 : towards_zero;
}

// --- Scales --------------------------------------------------------------------------------------

// The scale of a block of integers is a bfloat16: an integer of up to 8 bits times it is a float32,
// exactly.  It is 0 for a block of zeros, else a normal number, so that no mode which flushes
// subnormals touches it, or the one NaN for a block with an infinity or a NaN.
constexpr uint16_t kNanScale = 0x7fc0, kLeastScale = 0x0080;  // the latter 2^-126

// Rounds a positive `scale` to such a number: up where the mean must be right, so that nothing is
// cut off, else to nearest.  `greatest` is the last scale with which no code is infinite.
template <bool kUp>
RINGREDUCE_CODING uint16_t roundedScale(float scale, uint16_t greatest) {
  const uint32_t bits = as<uint32_t>(scale);
  const uint32_t rounded = (bits + (kUp ? 0xffff : 0x7fff + (bits >> 16 & 1))) >> 16;
  if (rounded < kLeastScale) return kLeastScale;
  return static_cast<uint16_t>(rounded < greatest ? rounded : greatest);
}

RINGREDUCE_CODING bool hasCodes(uint16_t scale) {
  return scale != 0 && scale != kNanScale;
}

// Whether an encoder makes this scale; a negative one only if kNegative.
template <bool kNegative>
RINGREDUCE_CODING bool isScale(uint16_t scale, uint16_t greatest) {
  if (!hasCodes(scale)) return true;
  const uint16_t magnitude = static_cast<uint16_t>(kNegative ? scale & 0x7fff : scale);
  return magnitude >= kLeastScale && magnitude <= greatest;
}

RINGREDUCE_CODING float scaleOf(uint16_t bits) {
  return as<float>(static_cast<uint32_t>(bits) << 16);
}

}  // namespace ringreduce::codec

// --- A block as vectors --------------------------------------------------------------------------

#ifdef RINGREDUCE_ISA
#include "kernels/tile.h"

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
constexpr int kVectors = codec::kBlock / kLanes;  // of a block: 2, 4 or 8

// The indices in a block of the elements of vector k.
RINGREDUCE_INLINE Words placesOf(int k) {
  Words places;
  for (int i = 0; i < kLanes; ++i) places[i] = static_cast<uint32_t>(k * kLanes + i);
  return places;
}

// Loads into a variable first: a vector that is copied straight into an array may be copied in
// halves, and a later load of the whole waits for both stores.
RINGREDUCE_INLINE Floats loadOne(const char* from) {
  Floats one;
  __builtin_memcpy(&one, from, sizeof one);
  return one;
}
RINGREDUCE_INLINE void load(Floats* values, const char* from) {
  for (int k = 0; k < kVectors; ++k) values[k] = loadOne(from + k * kVectorBytes);
}

// Writes a vector of a block, or adds it.
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

// Errors that a decoder finds, checked once at the end.
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
#endif
