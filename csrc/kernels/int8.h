// int8: a bfloat16 scale, then 32 signed bytes from -127 to 127.
#pragma once

#include "kernels/block.h"

namespace ringreduce::codec {

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

}  // namespace ringreduce::codec

#ifdef RINGREDUCE_ISA
#include "kernels/vectors.h"

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

}  // namespace
}  // namespace ringreduce
#endif
