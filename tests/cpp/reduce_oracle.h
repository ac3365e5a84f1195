// What the reduction kernels must compute, written a second time and as plainly as can be: one
// element after the other, in double or in 64-bit integers, with halves converted by way of scaling
// and rounding instead of by their bits.  Also the inputs of the tests, and how results are
// compared.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "base/dtype.h"

namespace oracle {

using namespace ringreduce;
using Bytes = std::vector<unsigned char>;

constexpr size_t kMost = 4099;  // elements of every input
constexpr int kMostSources = 24;

// --- The arithmetic ------------------------------------------------------------------------------

template <class T>
T get(const unsigned char* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

template <class T>
void put(unsigned char* p, T value) {
  std::memcpy(p, &value, sizeof value);
}

struct HalfFormat {
  int mantissaBits, bias;
};
inline HalfFormat formatOf(DType t) {
  return t == DType::kFloat16 ? HalfFormat{10, 15} : HalfFormat{7, 127};
}

inline double decodeHalf(DType t, uint16_t half) {
  const auto [bits, bias] = formatOf(t);
  const int mantissa = half & ((1 << bits) - 1), exponent = (half & 0x7fff) >> bits;
  double value;
  if (exponent == 2 * bias + 1) {
    value = mantissa ? std::nan("") : HUGE_VAL;
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, 1 - bias - bits);
  } else {
    value = std::ldexp(mantissa + (1 << bits), exponent - bias - bits);
  }
  return half & 0x8000 ? -value : value;
}

// `value` is a float32; what becomes of a NaN's bits is tested on its own.
inline uint16_t encodeHalf(DType t, double value) {
  const auto [bits, bias] = formatOf(t);
  const int sign = std::signbit(value) ? 0x8000 : 0, infinity = (2 * bias + 1) << bits;
  if (std::isnan(value)) return static_cast<uint16_t>(sign | infinity | 1 << (bits - 1));
  if (value == 0) return static_cast<uint16_t>(sign);
  if (std::isinf(value)) return static_cast<uint16_t>(sign | infinity);
  const int exponent = std::max(std::ilogb(value), 1 - bias);
  // Round to nearest even, in units of the last place; a carry only moves the exponent on.
  const int units = static_cast<int>(std::nearbyint(std::ldexp(std::fabs(value), bits - exponent)));
  const int encoded = ((exponent + bias - 1) << bits) + units;
  return static_cast<uint16_t>(sign | std::min(encoded, infinity));
}

inline double readFloat(DType t, const unsigned char* p) {
  if (t == DType::kFloat64) return get<double>(p);
  if (t == DType::kFloat32) return get<float>(p);
  return decodeHalf(t, get<uint16_t>(p));
}

inline void writeFloat(DType t, unsigned char* p, double value) {
  if (t == DType::kFloat64) return put(p, value);
  if (t == DType::kFloat32) return put(p, static_cast<float>(value));
  put(p, encodeHalf(t, value));
}

inline int64_t readInteger(DType t, const unsigned char* p) {
  switch (t) {
    case DType::kInt8:
      return get<int8_t>(p);
    case DType::kUInt8:
      return get<uint8_t>(p);
    case DType::kInt16:
      return get<int16_t>(p);
    case DType::kInt32:
      return get<int32_t>(p);
    case DType::kInt64:
      return get<int64_t>(p);
    default:
      return get<uint8_t>(p) != 0;
  }
}

// Little endian: the first bytes are the low ones, which is the wrapping.
inline void writeInteger(DType t, unsigned char* p, int64_t value) {
  std::memcpy(p, &value, sizeOf(t));
}

// In double, +, * and / of two float32 round once more to float32 as if computed exactly.
inline double round(DType t, double value) {
  return t == DType::kFloat64 ? value : static_cast<double>(static_cast<float>(value));
}

inline double applyFloat(DType t, ReduceOp op, double a, double b) {
  switch (op) {
    case ReduceOp::kMin:
      return std::isnan(a) ? a : std::isnan(b) || b < a ? b : a;
    case ReduceOp::kMax:
      return std::isnan(a) ? a : std::isnan(b) || b > a ? b : a;
    case ReduceOp::kProduct:
      return round(t, a * b);
    default:
      return round(t, a + b);
  }
}

inline int64_t applyInteger(ReduceOp op, int64_t a, int64_t b) {
  const uint64_t x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
  switch (op) {
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kMax:
      return std::max(a, b);
    case ReduceOp::kProduct:
      return static_cast<int64_t>(x * y);
    case ReduceOp::kBand:
      return static_cast<int64_t>(x & y);
    case ReduceOp::kBor:
      return static_cast<int64_t>(x | y);
    case ReduceOp::kBxor:
      return static_cast<int64_t>(x ^ y);
    default:
      return static_cast<int64_t>(x + y);
  }
}

// Of the first `count` sources, in this order; all are as long as the first.
inline Bytes expected(DType t, ReduceOp op, const std::vector<Bytes>& sources, int count,
                      int worldSize) {
  const size_t size = sizeOf(t);
  Bytes result(sources[0].size());
  for (size_t at = 0; at < result.size(); at += size) {
    if (isFloating(t)) {
      double value = readFloat(t, &sources[0][at]);
      for (int k = 1; k < count; ++k) {
        value = applyFloat(t, op, value, readFloat(t, &sources[k][at]));
      }
      if (op == ReduceOp::kAvg) value = round(t, value / worldSize);
      writeFloat(t, &result[at], value);
    } else {
      int64_t value = readInteger(t, &sources[0][at]);
      for (int k = 1; k < count; ++k) {
        value = applyInteger(op, value, readInteger(t, &sources[k][at]));
      }
      if (t == DType::kBool) value = op == ReduceOp::kBxor ? value & 1 : value != 0;
      unsigned char wrapped[8];
      writeInteger(t, wrapped, value);
      if (op == ReduceOp::kAvg) writeInteger(t, wrapped, readInteger(t, wrapped) / worldSize);
      std::memcpy(&result[at], wrapped, size);
    }
  }
  return result;
}

// --- Inputs and comparison -----------------------------------------------------------------------

// kMost elements: any bits at all for integers; for floating-point types mostly of a size at which
// sums round, and some NaNs, infinities, subnormals, zeros of both signs and huge values.
inline Bytes randomElements(DType t, std::minstd_rand& random) {
  const size_t size = sizeOf(t);
  Bytes bytes(kMost * size);
  for (unsigned char& b : bytes) b = static_cast<unsigned char>(random());
  if (t == DType::kBool) {
    for (unsigned char& b : bytes) b = b % 3 == 0 ? b : b % 2;  // any byte may stand for true
  }
  if (!isFloating(t)) return bytes;
  constexpr double kSpecial[] = {0.0, -0.0, HUGE_VAL, -HUGE_VAL, 65504, 3e38, 1e-40, 6e-8, -1, 1};
  std::normal_distribution<double> normal;
  for (size_t at = 0; at < bytes.size(); at += size) {
    const unsigned kind = random() % 16;
    if (kind == 0) continue;
    const double value = kind == 1 ? kSpecial[random() % std::size(kSpecial)] : normal(random);
    writeFloat(t, &bytes[at], round(t == DType::kFloat64 ? t : DType::kFloat32, value));
  }
  return bytes;
}

inline std::vector<Bytes> randomSources(DType t) {
  std::minstd_rand random(static_cast<unsigned>(t) + 1);
  std::vector<Bytes> sources;
  for (int k = 0; k < kMostSources; ++k) sources.push_back(randomElements(t, random));
  return sources;
}

// Equal bits, except that any NaN equals any other: which payload a sum of two NaNs keeps is not
// promised.
inline bool same(DType t, const unsigned char* a, const unsigned char* b, size_t n) {
  const size_t size = sizeOf(t);
  if (n == 0 || std::memcmp(a, b, n * size) == 0) return true;
  if (!isFloating(t)) return false;
  for (size_t at = 0; at < n * size; at += size) {
    if (std::memcmp(a + at, b + at, size) == 0) continue;
    if (!std::isnan(readFloat(t, a + at)) || !std::isnan(readFloat(t, b + at))) return false;
  }
  return true;
}

}  // namespace oracle
