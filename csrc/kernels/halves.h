// The codecs of 16 bits.  bfloat16: the upper half of a float32; the only NaN is 0x7fc0.  float16:
// 10 bits of mantissa, up to 65504, subnormals in units of 2^-24; the only NaN is 0x7e00.
//
// Only a bfloat16 has the range of float32.  A value that is not nearer to 65504 than to 65536
// becomes an infinite float16, also where rounding is random.
#pragma once

#include "kernels/codec_block.h"

namespace ringreduce::codec {

struct Bfloat16Code {
  static constexpr uint32_t kInfinite = 0x7f80, kNan = 0x7fc0;

  // The code of a float32.  `random` is used only if kStochastic.
  template <class L, bool kStochastic>
  RINGREDUCE_CODING static typename L::Word of(typename L::Word bits, typename L::Word random) {
    using Word = typename L::Word;
    const Word magnitude = bits & kMagnitude;
    // To nearest: just below half a unit, plus the bit that must become even.
    Word more;
    if constexpr (kStochastic)
      more = random >> 16;
    else
      more = 0x7fff + ((magnitude >> 16) & 1);
    Word code = (magnitude + more) >> 16;
    // A finite value stays finite.
    code = ifBelow<L>(code, kInfinite, code, Word{} + (kInfinite - 1));
    code = ifBelow<L>(magnitude, kInfinity, code, Word{} + kInfinite);
    code |= (bits >> 16) & 0x8000;
    return ifBelow<L>(magnitude, kInfinity + 1, code, Word{} + kNan);
  }

  template <class L>
  RINGREDUCE_CODING static typename L::Float value(typename L::Word code) {
    return as<typename L::Float>(code << 16);
  }
};

struct Float16Code {
  static constexpr uint32_t kInfinite = 0x7c00, kNan = 0x7e00;

  template <class L, bool kStochastic>
  RINGREDUCE_CODING static typename L::Word of(typename L::Word bits, typename L::Word random) {
    using Word = typename L::Word;
    using Float = typename L::Float;
    const Word magnitude = bits & kMagnitude;
    // float32 has 13 bits of mantissa more.  The units of subnormals are 2^-24.
    Word more, subnormal;
    const Float units = as<Float>(ifBelow<L>(magnitude, kLeastNormal, magnitude, Word{})) * 0x1p24f;
    if constexpr (kStochastic) {
      more = random >> 19;
      subnormal = as<Word>(L::truncated(units + part<L, 12>(random)));
    } else {
      more = 0x0fff + ((magnitude >> 13) & 1);
      subnormal = as<Word>(units + 0x1p23f) - 0x4b000000u;
    }
    Word code = (magnitude - kBias + more) >> 13;
    // One unit beyond the subnormals is the first normal number, and has its code.
    code = ifBelow<L>(magnitude, kLeastNormal, subnormal, code);
    if constexpr (kStochastic) code = ifBelow<L>(code, kInfinite, code, Word{} + (kInfinite - 1));
    code = ifBelow<L>(magnitude, kOverflow, code, Word{} + kInfinite);
    code |= (bits >> 16) & 0x8000;
    return ifBelow<L>(magnitude, kInfinity + 1, code, Word{} + kNan);
  }

  template <class L>
  RINGREDUCE_CODING static typename L::Float value(typename L::Word code) {
    using Word = typename L::Word;
    const Word magnitude = code & 0x7fff;
    const Word normal = (magnitude << 13) + kBias;
    // 31 is the exponent of infinity and NaN there, 255 here: the bias once more.
    const Word infinite = normal + kBias;
    // A normal float32, so no mode that flushes subnormals touches it.
    const Word subnormal = as<Word>(L::converted(as<typename L::Int>(magnitude)) * 0x1p-24f);
    Word bits = ifBelow<L>(magnitude, 0x0400, subnormal, normal);
    bits = ifBelow<L>(magnitude, kInfinite, bits, infinite);
    return as<typename L::Float>(bits | ((code & 0x8000) << 16));
  }

 private:
  static constexpr uint32_t kBias = uint32_t{127 - 15} << 23, kLeastNormal = 0x38800000;  // 2^-14
  static constexpr uint32_t kOverflow = 0x477ff000;                                       // 65520
};

}  // namespace ringreduce::codec

#ifdef RINGREDUCE_ISA
namespace ringreduce {
namespace {

// Code: Bfloat16Code or Float16Code.
template <class Code>
struct Halves {
  static constexpr size_t kBytes = 2 * kCodecBlock;
  static constexpr size_t bytesOf(size_t elements) { return 2 * elements; }

  template <bool kStochastic, bool kError>
  RINGREDUCE_INLINE static void encode(std::byte* out, char* error, const char* in, uint64_t key) {
    Floats values[kVectors];
    load(values, in);
    Words codes[kVectors];
    for (int k = 0; k < kVectors; ++k) {
      Words random{};
      if constexpr (kStochastic) random = codec::drawn<Lanes>(key, placesOf(k));
      codes[k] = Code::template of<Lanes, kStochastic>(bitsOf(values[k]), random);
      if constexpr (kError) {
        const Floats decoded = Code::template value<Lanes>(codes[k]);
        const Words lost = bitsOf(values[k] - decoded);
        const Words magnitude = bitsOf(decoded) & codec::kMagnitude;
        const Words none{};
        put<false>(error, k,
                   floatsOf(codec::ifBelow<Lanes>(magnitude, codec::kInfinity, lost, none)));
      }
    }
    for (int k = 0; k < kVectors; k += 2)
      store16(reinterpret_cast<char*>(out) + k * kVectorBytes / 2, {codes[k], codes[k + 1]});
  }

  // Errors are collected, and checked once at the end.
  struct Wrong {
    Ints codes{};
    bool any() const {
      bool any = false;
      for (int i = 0; i < kLanes; ++i) any |= codes[i] != 0;
      return any;
    }
  };

  template <bool kAdd>
  RINGREDUCE_INLINE static void decode(char* out, const std::byte* in, Wrong& wrong) {
    for (int k = 0; k < kVectors; k += 2) {
      const Tile<uint32_t> codes = load16(reinterpret_cast<const char*>(in) + k * kVectorBytes / 2);
      for (const Words& each : {codes.lo, codes.hi}) {
        const Ints signless = codec::as<Ints>(each & 0x7fff);
        wrong.codes |= (signless > static_cast<int32_t>(Code::kInfinite)) & (each != Code::kNan);
      }
      put<kAdd>(out, k, Code::template value<Lanes>(codes.lo));
      put<kAdd>(out, k + 1, Code::template value<Lanes>(codes.hi));
    }
  }

  static bool isZero(const std::byte*, size_t) { return true; }
};

}  // namespace
}  // namespace ringreduce
#endif
