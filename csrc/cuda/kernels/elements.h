// Elements on a GPU: how each dtype is stored, computed with, and rounded; one at a time, and
// giving the bits that the CPU's kernels (kernels/reduce_kernels.cc) give.
//
// `Stored` is the type in memory, `Value` the type that is added: float32 for halves, which are
// rounded once at the end, and a truth value (0 or 1) for bool.  Nothing here may be contracted to
// a fused multiply-add (-fmad=false, -ffp-contract=off).
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/bytes.h"
#include "base/dtype.h"

namespace ringreduce::cuda {

// How two values are combined.  AVG is kAdd with a division at the end, PREMUL_SUM kAdd with a
// multiplication first; for truth values SUM and MAX are kOr, PRODUCT and MIN are kAnd.
enum class Combine : uint8_t { kAdd, kMultiply, kMin, kMax, kAnd, kOr, kXor };

constexpr Combine combineOf(DType dtype, ReduceOp op) {
  const bool truth = dtype == DType::kBool;
  switch (op) {
    case ReduceOp::kMin:
      return truth ? Combine::kAnd : Combine::kMin;
    case ReduceOp::kMax:
      return truth ? Combine::kOr : Combine::kMax;
    case ReduceOp::kProduct:
      return truth ? Combine::kAnd : Combine::kMultiply;
    case ReduceOp::kBand:
      return Combine::kAnd;
    case ReduceOp::kBor:
      return Combine::kOr;
    case ReduceOp::kBxor:
      return Combine::kXor;
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
    case ReduceOp::kPremulSum:
      break;
  }
  return truth ? Combine::kOr : Combine::kAdd;
}

RINGREDUCE_DEVICE inline float widenFloat16(uint16_t half) {
#ifdef __CUDA_ARCH__
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
#else
  const uint32_t sign = (half & 0x8000u) << 16, magnitude = half & 0x7fffu;
  float value;
  if (magnitude >= 0x7c00) {  // infinity, or a NaN, which is made quiet
    const uint32_t bits =
        0x7f800000 | (magnitude & 0x3ff) << 13 | (magnitude > 0x7c00 ? 0x00400000 : 0);
    std::memcpy(&value, &bits, sizeof value);
  } else {
    // As a float32 whose exponent is 112 too small, subnormals too; the product is exact.
    const uint32_t bits = magnitude << 13;
    std::memcpy(&value, &bits, sizeof value);
    value *= 0x1p112f;
  }
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits |= sign;
  std::memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

RINGREDUCE_DEVICE inline uint16_t narrowFloat16(float value) {
#ifdef __CUDA_ARCH__
  uint16_t half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00 | (magnitude >> 13 & 0x3ff);
  } else if (magnitude >= 0x477ff000) {  // rounds to 2^16 or more
    half = 0x7c00;
  } else if (magnitude < 0x38800000) {  // a subnormal, or nothing: in units of 2^-24
    float scaled;
    std::memcpy(&scaled, &magnitude, sizeof scaled);
    // Adding 2^-1 leaves the units in the last place of a float32, rounded to nearest even.
    scaled += 0.5f;
    std::memcpy(&half, &scaled, sizeof half);
    half -= 0x3f000000;
  } else {
    const uint32_t rebased = magnitude - (112u << 23);
    half = (rebased + 0xfff + (rebased >> 13 & 1)) >> 13;
  }
  return static_cast<uint16_t>(sign | half);
#endif
}

// A bfloat16 is the upper half of a float32.
RINGREDUCE_DEVICE inline float widenBFloat16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

RINGREDUCE_DEVICE inline uint16_t narrowBFloat16(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800  // older GPUs have no such instruction
  uint16_t half;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return half;
#else
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  // Rounding could carry a NaN into infinity, or further into the sign.
  if (value != value) return static_cast<uint16_t>((bits | 0x00400000) >> 16);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#endif
}

template <DType dtype>
struct StoredAs;
#define RINGREDUCE_STORED(dtype, type) \
  template <>                          \
  struct StoredAs<DType::dtype> : std::type_identity<type> {}
RINGREDUCE_STORED(kFloat32, float);
RINGREDUCE_STORED(kFloat64, double);
RINGREDUCE_STORED(kFloat16, uint16_t);
RINGREDUCE_STORED(kBFloat16, uint16_t);
RINGREDUCE_STORED(kInt8, int8_t);
RINGREDUCE_STORED(kUInt8, uint8_t);
RINGREDUCE_STORED(kInt16, int16_t);
RINGREDUCE_STORED(kInt32, int32_t);
RINGREDUCE_STORED(kInt64, int64_t);
RINGREDUCE_STORED(kBool, uint8_t);
#undef RINGREDUCE_STORED

template <DType dtype>
struct Element {
  using Stored = typename StoredAs<dtype>::type;
  using Value = std::conditional_t<isHalf(dtype), float, Stored>;
  static constexpr DType kDType = dtype;
  static constexpr bool kFloating = isFloating(dtype), kComputes = true;

  RINGREDUCE_DEVICE static Value widen(Stored stored) {
    if constexpr (dtype == DType::kFloat16) return widenFloat16(stored);
    if constexpr (dtype == DType::kBFloat16) return widenBFloat16(stored);
    if constexpr (dtype == DType::kBool) return stored != 0;
    return static_cast<Value>(stored);
  }

  RINGREDUCE_DEVICE static Stored narrow(Value value) {
    if constexpr (dtype == DType::kFloat16) return narrowFloat16(value);
    if constexpr (dtype == DType::kBFloat16) return narrowBFloat16(value);
    return static_cast<Stored>(value);
  }

  RINGREDUCE_DEVICE static Value add(Value a, Value b) {
    if constexpr (kFloating) {
      return a + b;
    } else {
      return static_cast<Value>(bits(a) + bits(b));
    }
  }
  RINGREDUCE_DEVICE static Value multiply(Value a, Value b) {
    if constexpr (kFloating) {
      return a * b;
    } else {
      return static_cast<Value>(bits(a) * bits(b));
    }
  }
  // A NaN stays, whichever side it is on; of equal values (zeros of both signs) the first.
  RINGREDUCE_DEVICE static Value min(Value a, Value b) { return b < a || b != b ? b : a; }
  RINGREDUCE_DEVICE static Value max(Value a, Value b) { return b > a || b != b ? b : a; }

  RINGREDUCE_DEVICE static Value both(Value a, Value b) {
    return static_cast<Value>(bits(a) & bits(b));
  }
  RINGREDUCE_DEVICE static Value either(Value a, Value b) {
    return static_cast<Value>(bits(a) | bits(b));
  }
  RINGREDUCE_DEVICE static Value differing(Value a, Value b) {
    return static_cast<Value>(bits(a) ^ bits(b));
  }

  // Rounded to the dtype, as if it had been stored and loaded again.
  RINGREDUCE_DEVICE static Value scale(Value a, double factor) {
    return widen(narrow(a * static_cast<Value>(factor)));
  }

 private:
  // Unsigned and at least an int wide: overflow wraps.
  RINGREDUCE_DEVICE static auto bits(Value a) {
    if constexpr (sizeof(Value) < 4) {
      return static_cast<uint32_t>(a);
    } else {
      return static_cast<std::make_unsigned_t<Value>>(a);
    }
  }
};

// The division of AVG.  Integers are divided towards zero, as in C++.
//
// A division of integers is long, and a thread would do sixteen in a row.  Integers of up to 16
// bits are multiplied by ceil(2^32 / n) instead: the error, less than 2^16 / 2^32, never reaches
// the next whole number, which is at least 1/n away.
template <class E>
class Divider {
 public:
  using Value = typename E::Value;
  RINGREDUCE_DEVICE explicit Divider(int n)
      : n_(n), reciprocal_(n > 1 ? ~uint32_t{0} / static_cast<uint32_t>(n) + 1 : 0) {}

  RINGREDUCE_DEVICE Value operator()(Value a) const {
    if constexpr (sizeof(Value) < 4) {
      if (n_ == 1) return a;
      const int value = a;
      const auto size = static_cast<uint32_t>(value < 0 ? -value : value);
#ifdef __CUDA_ARCH__
      const auto quotient = static_cast<int>(__umulhi(size, reciprocal_));
#else
      const auto quotient = static_cast<int>(uint64_t{size} * reciprocal_ >> 32);
#endif
      return static_cast<Value>(value < 0 ? -quotient : quotient);
    } else {
      return a / static_cast<Value>(n_);
    }
  }

 private:
  const int n_;
  const uint32_t reciprocal_;
};

// acc[i] = acc[i] (how) in[i].  One kernel serves all operations: choosing one at run time, for
// values that are in registers already, costs nothing beside the loads.
template <class E, int n>
RINGREDUCE_DEVICE void combine(Combine how, typename E::Value (&acc)[n],
                               const typename E::Value (&in)[n]) {
  const auto each = [&](auto op) {
    RINGREDUCE_UNROLL for (int i = 0; i < n; ++i) acc[i] = op(acc[i], in[i]);
  };
  if constexpr (E::kDType == DType::kBool) {
    if (how == Combine::kOr) return each(E::either);
    if (how == Combine::kAnd) return each(E::both);
    return each(E::differing);
  } else {
    switch (how) {
      case Combine::kMultiply:
        return each(E::multiply);
      case Combine::kMin:
        return each(E::min);
      case Combine::kMax:
        return each(E::max);
      default:
        break;
    }
    if constexpr (!E::kFloating) {
      if (how == Combine::kAnd) return each(E::both);
      if (how == Combine::kOr) return each(E::either);
      if (how == Combine::kXor) return each(E::differing);
    }
    each(E::add);
  }
}

}  // namespace ringreduce::cuda
