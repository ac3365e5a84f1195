// Elements made from a number: the same on the host and on a GPU, so that a test's inputs need not
// be copied from one to the other, and any part of them can be made anew.
//
// Rough ones have all the bits that a dtype can have within a range that sums of them do not leave,
// and now and then a value at its edge: zeros of both signs, infinities, NaN, subnormals, the
// greatest.  Exact ones are small whole numbers, whose sum is the same in every order: they go with
// NCCL, which adds in an order of its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/bytes.h"
#include "cuda/kernels/elements.h"

namespace random_elements {

using ringreduce::DType;

enum class Texture : uint8_t { kRough, kExact };

// A permutation of 32 bits in which every bit of the result depends on every bit of x.
RINGREDUCE_DEVICE inline uint32_t mixed(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ x >> 16;
}

// Floating-point numbers by their bits.
template <DType dtype>
struct Format;
template <>
struct Format<DType::kFloat32> {
  using Bits = uint32_t;
  static constexpr int kMantissa = 23, kExponent = 8;
};
template <>
struct Format<DType::kFloat64> {
  using Bits = uint64_t;
  static constexpr int kMantissa = 52, kExponent = 11;
};
template <>
struct Format<DType::kFloat16> {
  using Bits = uint16_t;
  static constexpr int kMantissa = 10, kExponent = 5;
};
template <>
struct Format<DType::kBFloat16> {
  using Bits = uint16_t;
  static constexpr int kMantissa = 7, kExponent = 8;
};

template <class To, class From>
RINGREDUCE_DEVICE To sameBits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// An edge comes every so many elements, in each rank at others.
inline constexpr uint32_t kEdgeEvery = 251;

template <DType dtype>
struct Random {
  using Element = ringreduce::cuda::Element<dtype>;
  using Stored = typename Element::Stored;
  static constexpr bool kFloating = Element::kFloating;

  uint32_t key;  // keyOf
  Texture draw;

  RINGREDUCE_DEVICE Stored operator()(uint32_t i) const {
    if (draw == Texture::kExact) return exact(i);
    if constexpr (kFloating)
      if (isEdge(i)) return edge(i);
    return rough(i);
  }

  RINGREDUCE_DEVICE bool isEdge(uint32_t i) const {
    return (i + key % kEdgeEvery) % kEdgeEvery == 0;
  }

  RINGREDUCE_DEVICE uint32_t bits(uint32_t i) const { return mixed(i * 0x9e3779b1u + key); }

  RINGREDUCE_DEVICE Stored rough(uint32_t i) const {
    const uint32_t low = bits(i);
    if constexpr (dtype == DType::kBool) {
      return static_cast<Stored>(low & 1 ? low >> 8 | 1 : 0);
    } else if constexpr (kFloating) {
      using F = Format<dtype>;
      using Bits = typename F::Bits;
      auto all = static_cast<uint64_t>(low);
      if constexpr (sizeof(Bits) == 8) all = all << 32 | mixed(low ^ 0x5bd1e995u);
      // From 2^-8 to 2^8; float16, which has no more, from 2^-4 to 2^4.
      constexpr uint64_t kSteps = F::kExponent == 5 ? 8 : 16;
      constexpr uint64_t kOne = (uint64_t{1} << (F::kExponent - 1)) - 1;
      const uint64_t exponent = kOne - kSteps / 2 + (all >> F::kMantissa) % kSteps;
      constexpr uint64_t kRest = uint64_t{1} << (F::kMantissa + F::kExponent);
      constexpr uint64_t kFraction = (uint64_t{1} << F::kMantissa) - 1;
      return sameBits<Stored>(
          static_cast<Bits>((all & (kRest | kFraction)) | exponent << F::kMantissa));
    } else if constexpr (sizeof(Stored) == 8) {
      return static_cast<Stored>(static_cast<uint64_t>(low) << 32 | mixed(low ^ 0x5bd1e995u));
    } else {
      return static_cast<Stored>(low);
    }
  }

  RINGREDUCE_DEVICE Stored edge(uint32_t i) const
    requires kFloating
  {
    using F = Format<dtype>;
    using Bits = typename F::Bits;
    const uint32_t choice = bits(i) >> 8;
    constexpr uint64_t kInfinity = ((uint64_t{1} << F::kExponent) - 1) << F::kMantissa;
    uint64_t value = 0;
    switch (choice % 6) {
      case 1:
        value = kInfinity;
        break;
      case 2:
        value = kInfinity | uint64_t{1} << (F::kMantissa - 1) | (choice >> 8 & 7);
        break;
      case 3:  // a subnormal
        value = 1 + (choice >> 8 & 15);
        break;
      case 4:  // the greatest
        value = kInfinity - 1;
        break;
      case 5:  // the least that is normal
        value = uint64_t{1} << F::kMantissa;
        break;
      default:
        break;
    }
    const uint64_t sign = static_cast<uint64_t>(choice >> 4 & 1) << (F::kMantissa + F::kExponent);
    return sameBits<Stored>(static_cast<Bits>(value | sign));
  }

  RINGREDUCE_DEVICE Stored exact(uint32_t i) const {
    const int value = static_cast<int>(bits(i) >> 8 & 7);
    if constexpr (dtype == DType::kBool) return static_cast<Stored>(value & 1);
    // Signed ones from -3 on.
    constexpr bool kSigned = kFloating || std::is_signed_v<Stored>;
    return Element::narrow(static_cast<typename Element::Value>(kSigned ? value - 3 : value));
  }
};

// Whether two elements are the same: bit for bit, or both NaN.
template <DType dtype>
RINGREDUCE_DEVICE bool same(typename Random<dtype>::Stored a, typename Random<dtype>::Stored b) {
  if constexpr (Random<dtype>::kFloating) {
    using F = Format<dtype>;
    using Bits = typename F::Bits;
    constexpr auto kMagnitude =
        static_cast<Bits>((uint64_t{1} << (F::kMantissa + F::kExponent)) - 1);
    constexpr auto kInfinity =
        static_cast<Bits>(((uint64_t{1} << F::kExponent) - 1) << F::kMantissa);
    const auto x = sameBits<Bits>(a), y = sameBits<Bits>(b);
    return x == y || ((x & kMagnitude) > kInfinity && (y & kMagnitude) > kInfinity);
  } else {
    return a == b;
  }
}

// Calls f.template operator()<dtype>() for a dtype that can be reduced.
template <class F>
void withDType(DType dtype, F f) {
  switch (dtype) {
    case DType::kFloat32:
      return f.template operator()<DType::kFloat32>();
    case DType::kFloat64:
      return f.template operator()<DType::kFloat64>();
    case DType::kFloat16:
      return f.template operator()<DType::kFloat16>();
    case DType::kBFloat16:
      return f.template operator()<DType::kBFloat16>();
    case DType::kInt8:
      return f.template operator()<DType::kInt8>();
    case DType::kUInt8:
      return f.template operator()<DType::kUInt8>();
    case DType::kInt16:
      return f.template operator()<DType::kInt16>();
    case DType::kInt32:
      return f.template operator()<DType::kInt32>();
    case DType::kInt64:
      return f.template operator()<DType::kInt64>();
    default:
      return f.template operator()<DType::kBool>();
  }
}

#ifndef __CUDACC__

// What tells one rank's elements of one run from all others.
inline uint32_t keyOf(uint32_t seed, int rank) {
  return mixed(seed * 0x9e3779b9u + static_cast<uint32_t>(rank) * 0x85ebca6bu + 1);
}

// Elements `begin` to `begin + n` of a rank's, in the host's memory.
inline void fill(DType dtype, void* to, size_t begin, size_t n, Texture draw, uint32_t key) {
  withDType(dtype, [&]<DType t>() {
    const Random<t> random{key, draw};
    auto* out = static_cast<typename Random<t>::Stored*>(to);
    const auto first = static_cast<uint32_t>(begin);
    const auto count = static_cast<uint32_t>(n);
    if (draw == Texture::kExact) {
      for (uint32_t i = 0; i < count; ++i) out[i] = random.exact(first + i);
      return;
    }
    // Without the edges the compiler makes vectors of it; they are put in afterwards.
    for (uint32_t i = 0; i < count; ++i) out[i] = random.rough(first + i);
    if constexpr (Random<t>::kFloating) {
      uint32_t i = 0;
      while (i < count && !random.isEdge(first + i)) ++i;
      for (; i < count; i += kEdgeEvery) out[i] = random.edge(first + i);
    }
  });
}

#endif

}  // namespace random_elements
