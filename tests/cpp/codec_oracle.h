// The codecs one element at a time, with the arithmetic that a GPU's thread would use
// (codec::Single), and what the tests of codecs share.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/codec.h"
#include "kernels/halves.h"
#include "kernels/integers.h"
#include "kernels/reduce.h"

namespace oracle {

using namespace ringreduce;
using codec::as;
using codec::Single;
using Bytes = std::vector<std::byte>;

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kLargest = std::numeric_limits<float>::max();

inline void put16(std::byte* out, uint32_t value) {
  out[0] = static_cast<std::byte>(value);
  out[1] = static_cast<std::byte>(value >> 8);
}
inline uint16_t get16(const std::byte* in) {
  return static_cast<uint16_t>(static_cast<unsigned>(in[0]) | static_cast<unsigned>(in[1]) << 8);
}

template <class Code>
uint32_t half(uint32_t bits, const Draw* draw, uint32_t random) {
  return draw ? Code::template of<Single, true>(bits, random)
              : Code::template of<Single, false>(bits, random);
}

// The bytes of a block's codes: a scale, and a code for each of its elements.
inline void encodeInt8(std::byte* out, const float* values, const Draw* draw, uint64_t key) {
  uint32_t greatest = 0;
  for (size_t i = 0; i < kCodecBlock; ++i)
    greatest = std::max(greatest, as<uint32_t>(values[i]) & codec::kMagnitude);
  const uint16_t scale =
      draw ? codec::int8Scale<true>(greatest) : codec::int8Scale<false>(greatest);
  put16(out, scale);
  const float inverse = 1 / codec::scaleOf(scale);
  for (uint32_t i = 0; i < kCodecBlock && codec::hasCodes(scale); ++i) {
    const uint32_t random = codec::drawn<Single>(key, i);
    const int code = draw ? codec::int8Code<Single>(values[i], inverse, random)
                          : codec::int8Code<Single>(values[i], inverse);
    out[2 + i] = static_cast<std::byte>(code);
  }
}

inline void encodeInt4(std::byte* out, const float* values, const Draw* draw, uint64_t key) {
  int32_t up = 0, down = 0;
  for (size_t i = 0; i < kCodecBlock; ++i) {
    up = std::max(up, as<int32_t>(values[i]));
    down = std::max(down, as<int32_t>(-values[i]));
  }
  const auto scaleFor = draw ? codec::int4Scale<true> : codec::int4Scale<false>;
  const uint16_t scale = scaleFor(static_cast<uint32_t>(up), static_cast<uint32_t>(down));
  put16(out, scale);
  const float inverse = 1 / codec::scaleOf(scale);
  for (uint32_t i = 0; i < kCodecBlock && codec::hasCodes(scale); ++i) {
    const uint32_t random = codec::drawn<Single>(key, i);
    const int code = draw ? codec::int4Code<Single>(values[i], inverse, random)
                          : codec::int4Code<Single>(values[i], inverse);
    out[2 + i % 16] |= static_cast<std::byte>((code & 15) << (i < 16 ? 0 : 4));
  }
}

inline Bytes encoded(Codec codec, const std::vector<float>& in, const Draw* draw = nullptr) {
  const size_t n = in.size();
  Bytes out(codedBytes(codec, n));
  for (size_t first = 0; first < n; first += kCodecBlock) {
    const size_t rest = std::min(n - first, kCodecBlock), block = first / kCodecBlock;
    float values[kCodecBlock] = {};
    std::copy_n(in.begin() + static_cast<long>(first), rest, values);
    const uint64_t key =
        draw ? codec::keyOf(draw->seed, draw->first / kCodecBlock + block) : uint64_t{0};
    std::byte* const to = out.data() + codedBytes(codec, first);
    if (codec == Codec::kInt8) encodeInt8(to, values, draw, key);
    if (codec == Codec::kInt4) encodeInt4(to, values, draw, key);
    for (uint32_t i = 0; i < rest; ++i) {
      const uint32_t bits = as<uint32_t>(values[i]), random = codec::drawn<Single>(key, i);
      if (codec == Codec::kBfloat16)
        put16(to + 2 * i, half<codec::Bfloat16Code>(bits, draw, random));
      if (codec == Codec::kFloat16) put16(to + 2 * i, half<codec::Float16Code>(bits, draw, random));
    }
  }
  return out;
}

// What element i of a message stands for.
inline float decoded(Codec codec, const Bytes& coded, size_t i) {
  if (codec == Codec::kBfloat16) return codec::Bfloat16Code::value<Single>(get16(&coded[2 * i]));
  if (codec == Codec::kFloat16) return codec::Float16Code::value<Single>(get16(&coded[2 * i]));
  const std::byte* const block = &coded[codedBytes(codec, i / kCodecBlock * kCodecBlock)];
  const size_t place = i % kCodecBlock;
  const uint16_t scale = get16(block);
  if (codec == Codec::kInt8)
    return static_cast<float>(static_cast<int8_t>(block[2 + place])) * codec::scaleOf(scale);
  const int pair = static_cast<int>(block[2 + place % 16]);
  const int code = ((place < 16 ? pair & 15 : pair >> 4) ^ 8) - 8;
  const int whole = codec::int4Whole(code, scale >> 15 ? -1 : 0);
  return static_cast<float>(whole) * codec::scaleOf(scale & 0x7fff);
}

// --- What the tests share ------------------------------------------------------------------------

template <class Body>
void forEachCodec(Body body) {
  for (int c = 0; c < kCodecs; ++c) body(static_cast<Codec>(c));
}
// Calls body(set, codec, its kernels there).
template <class Body>
void forEachKernel(Body body) {
  for (const KernelSet& set : kernelSets())
    if (set.runs) forEachCodec([&](Codec codec) { body(set, codec, set.codecs(codec)); });
}

inline std::string describe(const KernelSet& set, Codec codec, size_t n) {
  return std::string(set.name)
      .append(" ")
      .append(name(codec))
      .append(", ")
      .append(std::to_string(n));
}

inline bool sameBits(float a, float b) {
  return as<uint32_t>(a) == as<uint32_t>(b);
}

// Values of a kind, and now and then one that is special, or too large for a float16.  No NaN or
// infinity unless `wild`.
inline std::vector<float> someValues(size_t n, uint64_t seed, bool wild) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  constexpr float kTame[] = {0.f, -0.f, 1e-45f, -3e-39f, 0x1p-126f, kLargest, -kLargest, 65520.f};
  constexpr float kWild[] = {kInf, -kInf, kNan, -kNan};
  std::vector<float> values(n);
  // Each block has a range of its own.
  float range = 1;
  for (size_t i = 0; i < n; ++i) {
    if (i % kCodecBlock == 0) range = std::ldexp(1.f, static_cast<int>(random() % 250) - 140);
    values[i] = normal(random) * range;
    if (values[i] > kLargest || values[i] < -kLargest) values[i] = kLargest;
    if (random() % 40 == 0) values[i] = kTame[random() % 8];
    if (wild && random() % 200 == 0) values[i] = kWild[random() % 4];
  }
  return values;
}

}  // namespace oracle
