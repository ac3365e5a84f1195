// float16: 10 bits of mantissa, up to 65504, subnormals in units of 2^-24.  The only NaN is 0x7e00.
#pragma once

#include "kernels/block.h"

namespace ringreduce::codec {

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
    code = ifBelow<L>(code, kInfinite, code, Word{} + (kInfinite - 1));
    code = ifBelow<L>(magnitude, kInfinity, code, Word{} + kInfinite);
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
};

}  // namespace ringreduce::codec
