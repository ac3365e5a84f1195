// How float32 values travel in fewer bytes: bfloat16, float16, and integers of 8 and 4 bits in
// blocks of 32 with a scale each.  docs/compression.md has the layout of the bytes and why.
//
// An element's code depends on the values of its block only, so a message that is cut at multiples
// of kCodecBlock elements gives the same bytes however it is cut.  Decoding is exact arithmetic:
// the same bits on every machine, with or without fused multiply-adds, whatever its mode for
// subnormals.  Encoding gives the same bytes in all instruction sets.
//
// Finite values stay finite: what is too large for a code saturates, and the rest is error.  An
// infinity or a NaN arrives as no finite value; the integer codecs make all of its block NaN.
// -0.0 may arrive as 0.0.
//
// Pointers need no alignment.  No kernel allocates, blocks or throws.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/coding.h"

namespace ringreduce {

// Elements that share a scale.  The last block of a message is filled up with zeros.
inline constexpr size_t kCodecBlock = 32;

// Bytes that `count` elements become.
constexpr size_t codedBytes(Codec codec, size_t count) {
  const CodecInfo& info = infoOf(codec);
  if (info.scale_bytes == 0) return count * info.bits / 8;
  const size_t blocks = count / kCodecBlock + (count % kCodecBlock != 0);
  return blocks * (info.scale_bytes + kCodecBlock * info.bits / 8);
}

// The random numbers of stochastic rounding: a function of the seed and of an element's place in
// the message, so that they are the same however the message is cut.  To encode the same place more
// than once, or on several ranks, mix that into the seed (mixedSeed).
struct Draw {
  uint64_t seed = 0;
  uint64_t first = 0;  // the place of the first element; a multiple of kCodecBlock
};

// A seed of its own for each `salt`: a rank, a hop, or several mixed in one after another.
constexpr uint64_t mixedSeed(uint64_t seed, uint64_t salt) {
  uint64_t x = seed + (salt + 1) * 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

struct CodecKernels {
  // `out` has codedBytes(n).  `error` may be null, or `in` itself: it receives in[i] minus what
  // decode gives for it, and 0 where that is not finite.  Rounds to nearest, or with `draw` up or
  // down at random, so that the mean is right.  No other overlap.
  void (*encode)(std::byte* out, float* error, const float* in, size_t n, const Draw* draw);

  // False, and nothing promised of `out`, if `bytes` is not codedBytes(n) or a block is one that
  // no encoder makes.  Reads no more than `bytes`, writes no more than n.  No overlap.
  bool (*decode)(float* out, const std::byte* in, size_t bytes, size_t n);

  // sum[i] += what decode gives.
  bool (*decodeAdd)(float* sum, const std::byte* in, size_t bytes, size_t n);
};

// Those for this CPU, of the instruction set that reduce.h has chosen.
const CodecKernels& codecKernels(Codec codec);

inline void encode(Codec codec, std::byte* out, float* error, const float* in, size_t n,
                   const Draw* draw = nullptr) {
  codecKernels(codec).encode(out, error, in, n, draw);
}
inline bool decode(Codec codec, float* out, const std::byte* in, size_t bytes, size_t n) {
  return codecKernels(codec).decode(out, in, bytes, n);
}
inline bool decodeAdd(Codec codec, float* sum, const std::byte* in, size_t bytes, size_t n) {
  return codecKernels(codec).decodeAdd(sum, in, bytes, n);
}

}  // namespace ringreduce
