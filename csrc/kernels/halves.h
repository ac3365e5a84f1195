// The loops of a block of 16-bit codes.  Only for kernels.cc (see vectors.h).
#pragma once

#include "kernels/vectors.h"

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

  // What is wrong is gathered, and looked at once at the end.
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
