// Element types and reduce operations: sizes, names, which pairs are supported.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace ringreduce {

// Ranks send each other these values, so they never change meaning.
enum class DType : uint8_t {
  kFloat32,
  kFloat64,
  kFloat16,
  kBFloat16,
  kInt8,
  kUInt8,
  kInt16,
  kInt32,
  kInt64,
  kBool,
  kUInt16,
  kUInt32,
  kUInt64,
  kComplex64,
  kComplex128,
  kFloat8E4M3FN,
  kFloat8E5M2,
  kFloat8E4M3FNUZ,
  kFloat8E5M2FNUZ,
  kFloat8E8M0FNU,
  kFloat4E2M1FNx2,
  kComplex32,
};

enum class ReduceOp : uint8_t { kSum, kAvg, kMin, kMax, kProduct, kBand, kBor, kBxor, kPremulSum };
inline constexpr int kReduceOps = 9;

// How elements are reduced.  A half is a floating-point type whose partial results are float32.
enum class NumberKind : uint8_t { kNone, kFloat, kHalf, kInteger, kTruth };

struct DTypeInfo {
  const char* name;                        // torch's own spelling, without "torch."
  uint32_t size;                           // bytes an element
  NumberKind numbers = NumberKind::kNone;  // none: the elements can only be moved
};

// In the order of DType.
inline constexpr std::array kDTypes{
    DTypeInfo{"float32", 4, NumberKind::kFloat},
    DTypeInfo{"float64", 8, NumberKind::kFloat},
    DTypeInfo{"float16", 2, NumberKind::kHalf},
    DTypeInfo{"bfloat16", 2, NumberKind::kHalf},
    DTypeInfo{"int8", 1, NumberKind::kInteger},
    DTypeInfo{"uint8", 1, NumberKind::kInteger},
    DTypeInfo{"int16", 2, NumberKind::kInteger},
    DTypeInfo{"int32", 4, NumberKind::kInteger},
    DTypeInfo{"int64", 8, NumberKind::kInteger},
    DTypeInfo{"bool", 1, NumberKind::kTruth},
    DTypeInfo{"uint16", 2},
    DTypeInfo{"uint32", 4},
    DTypeInfo{"uint64", 8},
    DTypeInfo{"complex64", 8},
    DTypeInfo{"complex128", 16},
    DTypeInfo{"float8_e4m3fn", 1},
    DTypeInfo{"float8_e5m2", 1},
    DTypeInfo{"float8_e4m3fnuz", 1},
    DTypeInfo{"float8_e5m2fnuz", 1},
    DTypeInfo{"float8_e8m0fnu", 1},
    DTypeInfo{"float4_e2m1fn_x2", 1},
    DTypeInfo{"complex32", 4},
};

static_assert(kDTypes.size() == static_cast<size_t>(DType::kComplex32) + 1);  // the last one

inline constexpr std::array<const char*, kReduceOps> kReduceOpNames{
    "SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR", "PREMUL_SUM"};

constexpr const char* name(DType t) {
  return kDTypes[static_cast<size_t>(t)].name;
}
constexpr size_t sizeOf(DType t) {
  return kDTypes[static_cast<size_t>(t)].size;
}
constexpr const char* name(ReduceOp op) {
  return kReduceOpNames[static_cast<size_t>(op)];
}

constexpr NumberKind numberKindOf(DType t) {
  return kDTypes[static_cast<size_t>(t)].numbers;
}
constexpr bool isHalf(DType t) {
  return numberKindOf(t) == NumberKind::kHalf;
}
constexpr bool isFloating(DType t) {
  return numberKindOf(t) == NumberKind::kFloat || isHalf(t);
}
constexpr bool isReducible(DType t) {
  return numberKindOf(t) != NumberKind::kNone;
}

// Whether `op` has a meaning for elements of type `t`.  bool: SUM and MAX are "or", PRODUCT and MIN
// are "and"; an average of truth values, and bits of floating-point numbers, have none.
constexpr bool isSupported(DType t, ReduceOp op) {
  if (!isReducible(t)) return false;
  switch (op) {
    case ReduceOp::kBand:
    case ReduceOp::kBor:
    case ReduceOp::kBxor:
      return !isFloating(t);
    case ReduceOp::kAvg:
      return numberKindOf(t) != NumberKind::kTruth;
    case ReduceOp::kPremulSum:
      return isFloating(t);
    default:
      return true;
  }
}

}  // namespace ringreduce
