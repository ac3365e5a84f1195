// Codecs that make fewer bytes of float32 values: bfloat16, float16, and integers of 8 and 4 bits
// in blocks of 32 with a scale each.  docs/compression.md describes the layout and the reasons.
//
// The code of an element depends on the values of its block only, so every cut of a message at
// multiples of kCodecBlock elements gives the same bytes.  Decoding is exact arithmetic: the same
// bits on every machine, with or without fused multiply-adds, in any mode for subnormals.  Encoding
// gives the same bytes in all instruction sets.
//
// An infinity or a NaN never decodes as a finite value; the integer codecs make all of its block
// NaN.  Nor does a value from 65520 on as a float16: it becomes infinite.  The other codecs have
// the range of float32, and finite values stay finite.  -0.0 may decode as 0.0.
//
// Pointers need no alignment.  No kernel allocates, blocks or throws.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/op_signature.h"

namespace ringreduce {

// Elements that share a scale.  The last block of a message is padded with zeros.
inline constexpr size_t kCodecBlock = 32;

// The coded size of `count` elements.
constexpr size_t codedBytes(Codec codec, size_t count) {
  const CodecInfo& info = infoOf(codec);
  if (info.scale_bytes == 0) return count * info.bits / 8;
  const size_t blocks = count / kCodecBlock + (count % kCodecBlock != 0);
  return blocks * (info.scale_bytes + kCodecBlock * info.bits / 8);
}

// The random numbers of stochastic rounding: a function of the seed and of an element's index in
// the message, so that they do not depend on the cut.  To encode an index more than once, or on
// several ranks, mix that into the seed (mixedSeed).
struct Draw {
  uint64_t seed = 0;
  uint64_t first = 0;  // the index of the first element; a multiple of kCodecBlock
};

// Derives a seed for each `salt`: a rank, a hop, or several one after another.
constexpr uint64_t mixedSeed(uint64_t seed, uint64_t salt) {
  uint64_t x = seed + (salt + 1) * 0x9e3779b97f4a7c15;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

struct CodecKernels {
  // `out` has codedBytes(n).  `error` may be null, or `in` itself: it receives in[i] minus the
  // decoded value, and 0 where that is not finite.  Rounds to nearest, or with `draw` up or
  // down at random, so that the mean is right.  No other overlap.
  void (*encode)(std::byte* out, float* error, const float* in, size_t n, const Draw* draw);

  // Returns false, with `out` unspecified, if `bytes` is not codedBytes(n) or no encoder makes one
  // of the blocks.  Reads at most `bytes`, writes at most n elements.  No overlap.
  bool (*decode)(float* out, const std::byte* in, size_t bytes, size_t n);

  // The same, added: sum[i] += decoded[i].
  bool (*decodeAdd)(float* sum, const std::byte* in, size_t bytes, size_t n);
};

// The kernels of the instruction set that reduce.h has chosen.
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
