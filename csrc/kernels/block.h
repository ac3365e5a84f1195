// What the codecs share: bits and floats, random numbers, codes, and the scale of a block.  One
// text for vectors of the host and for a GPU: functions on Lanes, whose Float, Word and Int are
// vectors or single numbers.
//
// Everything is inlined always: kernels.cc is compiled once for each instruction set, and the
// linker must find no function in it to merge with its twin.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/device.h"
#include "kernels/codec.h"

#ifdef __CUDACC__
#define RINGREDUCE_CODING RINGREDUCE_DEVICE __forceinline__
#else
#define RINGREDUCE_CODING [[gnu::always_inline]] inline
#endif

namespace ringreduce::codec {

// The lanes of who computes one element at a time.
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

// A block's own; its elements' are made of it with 32-bit arithmetic, which all vectors have.
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

// Up with the probability of what is above a whole number, which itself stays as it is.
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

// `scale`, positive, as such a number; `greatest`: the last with which no code is infinite.  Up,
// so that nothing is cut off, where the mean is to be right; else to nearest.
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

// Whether an encoder makes it; a negative one only where kNegative.
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
