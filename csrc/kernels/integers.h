// The codecs of 8 and 4 bits: a bfloat16 scale for each block, then its codes.
//
// int8: 32 signed bytes from -127 to 127.
//
// int4: 16 bytes; byte i holds the codes of elements i (low half) and i + 16, two's complement from
// -8 to 7.  The scale has the sign with which the greatest magnitude of a block becomes -8: one
// level more than -7 to 7 has, which is an eighth less error for no more bytes
// (docs/compression.md).
#pragma once

#include "kernels/codec_block.h"

namespace ringreduce::codec {

// --- int8

constexpr uint16_t kGreatestInt8Scale = 0x7c01;  // 127 times it is below 2^128

// `greatest`: the bits of the greatest magnitude.  To nearest the greatest may be cut off by a
// quarter of a step; its code is still 127.
template <bool kStochastic>
RINGREDUCE_CODING uint16_t int8Scale(uint32_t greatest) {
  if (greatest == 0) return 0;
  if (greatest >= kInfinity) return kNanScale;
  return roundedScale<kStochastic>(as<float>(greatest) * (1.f / 127), kGreatestInt8Scale);
}

template <class L>
RINGREDUCE_CODING typename L::Int int8Code(typename L::Float value, float inverse) {
  return nearest<L>(value * inverse);
}
template <class L>
RINGREDUCE_CODING typename L::Int int8Code(typename L::Float value, float inverse,
                                           typename L::Word random) {
  typename L::Float scaled = value * inverse;
  scaled = scaled < 127.f ? scaled : typename L::Float{} + 127.f;
  scaled = scaled > -127.f ? scaled : typename L::Float{} - 127.f;
  return atRandom<L>(scaled, random);
}

// --- int4

constexpr uint16_t kGreatestInt4Scale = 0x7dff;  // 8 times it is below 2^128

// `up`, `down`: the bits of the greatest and of minus the least value, 0 where there is none above
// or below 0.  The lesser of the two becomes less than 7.5, also if the scale is rounded down: so
// no value is further than half a step from its code, except at the end of the range of float32.
// Where the mean is to be right it becomes 7.
template <bool kStochastic>
RINGREDUCE_CODING uint16_t int4Scale(uint32_t up, uint32_t down) {
  const uint32_t greater = up > down ? up : down, lesser = up > down ? down : up;
  if (greater == 0) return 0;
  if (greater >= kInfinity) return kNanScale;
  const float eighth = as<float>(greater) * 0.125f;
  const float other = as<float>(lesser) * (kStochastic ? 1 / 7.f : 1 / 7.47f);
  const uint16_t scale =
      roundedScale<kStochastic>(eighth > other ? eighth : other, kGreatestInt4Scale);
  return static_cast<uint16_t>(scale | (up > down ? 0x8000 : 0));
}

// `inverse` has the scale's sign.
template <class L>
RINGREDUCE_CODING typename L::Int int4Code(typename L::Float value, float inverse) {
  const typename L::Float scaled = value * inverse;
  return nearest<L>(scaled < 7.f ? scaled : typename L::Float{} + 7.f);
}
template <class L>
RINGREDUCE_CODING typename L::Int int4Code(typename L::Float value, float inverse,
                                           typename L::Word random) {
  typename L::Float scaled = value * inverse;
  scaled = scaled < 7.f ? scaled : typename L::Float{} + 7.f;
  scaled = scaled > -8.f ? scaled : typename L::Float{} - 8.f;
  return atRandom<L>(scaled, random);
}

// The whole number that a code with this scale stands for: in units of the scale's magnitude, so
// that a 0 has no sign.  `negative`: -1 if the scale is, else 0.
template <class Int, class Sign>
RINGREDUCE_CODING Int int4Whole(Int code, Sign negative) {
  return (code ^ negative) - negative;
}

}  // namespace ringreduce::codec

#ifdef RINGREDUCE_ISA
namespace ringreduce {
namespace {

struct Int8 {
  static constexpr size_t kBytes = 2 + kCodecBlock;
  static constexpr size_t bytesOf(size_t) { return kBytes; }

  template <bool kStochastic, bool kError>
  RINGREDUCE_INLINE static void encode(std::byte* out, char* error, const char* in, uint64_t key) {
    Floats values[kVectors];
    load(values, in);
    Ints greatest{};
    for (const Floats& each : values) {
      const Ints magnitude = codec::as<Ints>(each) & static_cast<int32_t>(codec::kMagnitude);
      greatest = magnitude > greatest ? magnitude : greatest;
    }
    const uint16_t scale =
        codec::int8Scale<kStochastic>(static_cast<uint32_t>(greatestOf(greatest)));
    __builtin_memcpy(out, &scale, 2);
    if (!codec::hasCodes(scale)) {
      __builtin_memset(out + 2, 0, kCodecBlock);
      if constexpr (kError) __builtin_memset(error, 0, sizeof values);
      return;
    }
    const float step = codec::scaleOf(scale), inverse = 1 / step;
    Ints codes[kVectors];
    for (int k = 0; k < kVectors; ++k) {
      if constexpr (kStochastic)
        codes[k] =
            codec::int8Code<Lanes>(values[k], inverse, codec::drawn<Lanes>(key, placesOf(k)));
      else
        codes[k] = codec::int8Code<Lanes>(values[k], inverse);
      if constexpr (kError) put<false>(error, k, values[k] - Lanes::converted(codes[k]) * step);
    }
    narrowBytes(out + 2, codes);
  }

  using Wrong = WrongBlocks;

  template <bool kAdd>
  RINGREDUCE_INLINE static void decode(char* out, const std::byte* in, Wrong& wrong) {
    uint16_t scale;
    __builtin_memcpy(&scale, in, 2);
    wrong.scales |= !codec::isScale<false>(scale, codec::kGreatestInt8Scale);
    const int8_t none = codec::hasCodes(scale) ? 0 : -1;
    for (int half = 0; half < 2; ++half) {
      const Bytes codes = loadBytes(in + 2 + 16 * half);
      wrong.codes |= (codes == -128) | (codes & none);
    }
    const float step = codec::scaleOf(scale);
    for (int k = 0; k < kVectors; ++k)
      put<kAdd>(out, k, Lanes::converted(widenBytes(in + 2 + k * kLanes)) * step);
  }

  static bool isZero(const std::byte* in, size_t i) { return in[2 + i] == std::byte{0}; }
};

struct Int4 {
  static constexpr size_t kPairs = kCodecBlock / 2, kBytes = 2 + kPairs;
  static constexpr size_t bytesOf(size_t) { return kBytes; }

  template <bool kStochastic, bool kError>
  RINGREDUCE_INLINE static void encode(std::byte* out, char* error, const char* in, uint64_t key) {
    Floats values[kVectors];
    load(values, in);
    // Positive floats are in the order of their bits, and negative ones come below 0.
    Ints up{}, down{};
    for (const Floats& each : values) {
      const Ints bits = codec::as<Ints>(each);
      const Ints minus = bits ^ static_cast<int32_t>(codec::kSign);
      up = bits > up ? bits : up;
      down = minus > down ? minus : down;
    }
    const uint16_t scale = codec::int4Scale<kStochastic>(static_cast<uint32_t>(greatestOf(up)),
                                                         static_cast<uint32_t>(greatestOf(down)));
    __builtin_memcpy(out, &scale, 2);
    if (!codec::hasCodes(scale)) {
      __builtin_memset(out + 2, 0, kPairs);
      if constexpr (kError) __builtin_memset(error, 0, sizeof values);
      return;
    }
    const float inverse = 1 / codec::scaleOf(scale);
    const float step = codec::scaleOf(scale & 0x7fff);
    const int negative = -(scale >> 15);
    Ints codes[kVectors];
    for (int k = 0; k < kVectors; ++k) {
      if constexpr (kStochastic)
        codes[k] =
            codec::int4Code<Lanes>(values[k], inverse, codec::drawn<Lanes>(key, placesOf(k)));
      else
        codes[k] = codec::int4Code<Lanes>(values[k], inverse);
      if constexpr (kError) {
        const Ints whole = codec::int4Whole(codes[k], negative);
        put<false>(error, k, values[k] - Lanes::converted(whole) * step);
      }
    }
    int8_t bytes[kCodecBlock];
    narrowBytes(bytes, codes);
    const UnsignedBytes low = codec::as<UnsignedBytes>(loadBytes(bytes));
    const UnsignedBytes high = codec::as<UnsignedBytes>(loadBytes(bytes + kPairs));
    const UnsignedBytes pairs = (low & 15) | (high << 4);
    __builtin_memcpy(out + 2, &pairs, sizeof pairs);
  }

  using Wrong = WrongBlocks;

  template <bool kAdd>
  RINGREDUCE_INLINE static void decode(char* out, const std::byte* in, Wrong& wrong) {
    uint16_t scale;
    __builtin_memcpy(&scale, in, 2);
    wrong.scales |= !codec::isScale<true>(scale, codec::kGreatestInt4Scale);
    const Bytes pairs = loadBytes(in + 2);
    const int8_t none = codec::hasCodes(scale) ? 0 : -1;
    wrong.codes |= pairs & none;

    // Of four bits with a sign, eight: the sign's worth taken off twice.
    const Bytes low = ((pairs & 15) ^ 8) - 8;
    const Bytes high = (codec::as<Bytes>(codec::as<UnsignedBytes>(pairs) >> 4) ^ 8) - 8;
    const int8_t negative = static_cast<int8_t>(-(scale >> 15));
    const Bytes halves[] = {codec::int4Whole(low, negative), codec::int4Whole(high, negative)};
    const float step = codec::scaleOf(scale & 0x7fff);
    const char* const bytes = reinterpret_cast<const char*>(halves);
    for (int k = 0; k < kVectors; ++k)
      put<kAdd>(out, k, Lanes::converted(widenBytes(bytes + k * kLanes)) * step);
  }

  static bool isZero(const std::byte* in, size_t i) {
    const uint8_t pair = static_cast<uint8_t>(in[2 + i % kPairs]);
    return (i < kPairs ? pair & 15 : pair >> 4) == 0;
  }
};

}  // namespace
}  // namespace ringreduce
#endif
