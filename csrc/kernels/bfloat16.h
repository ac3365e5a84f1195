// bfloat16: the upper half of a float32.  The only NaN is 0x7fc0.
#pragma once

#include "kernels/block.h"

namespace ringreduce::codec {

struct Bfloat16Code {
  static constexpr uint32_t kInfinite = 0x7f80, kNan = 0x7fc0;

  // A float32's code.  `random`: null for rounding to nearest.
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
    // What is finite stays finite.
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

}  // namespace ringreduce::codec
