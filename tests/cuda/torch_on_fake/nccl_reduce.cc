// Arithmetic: in double or in 64 bits, rounded once.
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "nccl_calls.h"

namespace fake::nccl {
namespace {

struct BFloat16 {
  uint16_t bits;

  BFloat16() = default;
  // By way of float, to the nearest, and of two to the even one.
  explicit BFloat16(double value) {
    const auto single = std::bit_cast<uint32_t>(static_cast<float>(value));
    bits = static_cast<uint16_t>(
        std::isnan(value) ? 0x7fc0 : (single + 0x7fff + ((single >> 16) & 1)) >> 16);
  }
  explicit operator double() const {
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }
};

template <class T>
using Wide = std::conditional_t<!std::is_integral_v<T>, double,
                                std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>;

// Integers wrap.
template <class W>
W times(W a, W b) {
  if constexpr (std::is_integral_v<W>)
    return static_cast<W>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  else
    return a * b;
}
template <class W>
W plus(W a, W b) {
  if constexpr (std::is_integral_v<W>)
    return static_cast<W>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  else
    return a + b;
}

template <class W>
W fold(W a, W b, int op) {
  switch (op) {
    case kProduct:
      return times(a, b);
    case kMax:
      return a > b || a != a ? a : b;
    case kMin:
      return a < b || a != a ? a : b;
    default:
      return plus(a, b);
  }
}

template <class T>
T element(const std::byte* data, size_t i) {
  T value;
  std::memcpy(&value, data + i * sizeof(T), sizeof(T));
  return value;
}

template <class T>
void reduceAll(const std::vector<const std::byte*>& inputs, void* to, size_t count, int op) {
  for (size_t i = 0; i < count; ++i) {
    auto sum = static_cast<Wide<T>>(element<T>(inputs[0], i));
    for (size_t rank = 1; rank < inputs.size(); ++rank)
      sum = fold(sum, static_cast<Wide<T>>(element<T>(inputs[rank], i)), op);
    if (op == kAverage) sum /= static_cast<Wide<T>>(inputs.size());
    const auto result = static_cast<T>(sum);
    std::memcpy(static_cast<std::byte*>(to) + i * sizeof(T), &result, sizeof(T));
  }
}

template <class T>
void multiplyAll(std::byte* data, size_t count, const Factor& factor) {
  const auto by =
      factor.on_device
          ? static_cast<Wide<T>>(element<T>(static_cast<const std::byte*>(factor.on_device), 0))
          : static_cast<Wide<T>>(factor.value);
  for (size_t i = 0; i < count; ++i) {
    const auto result = static_cast<T>(times(static_cast<Wide<T>>(element<T>(data, i)), by));
    std::memcpy(data + i * sizeof(T), &result, sizeof(T));
  }
}

// Calls f with a null pointer to the type.
template <class F>
void withType(int dtype, F&& f) {
  switch (dtype) {
    case kInt8:
      return f(static_cast<int8_t*>(nullptr));
    case kUInt8:
      return f(static_cast<uint8_t*>(nullptr));
    case kInt32:
      return f(static_cast<int32_t*>(nullptr));
    case kUInt32:
      return f(static_cast<uint32_t*>(nullptr));
    case kInt64:
      return f(static_cast<int64_t*>(nullptr));
    case kUInt64:
      return f(static_cast<uint64_t*>(nullptr));
    case kFloat16:
      return f(static_cast<_Float16*>(nullptr));
    case kFloat32:
      return f(static_cast<float*>(nullptr));
    case kFloat64:
      return f(static_cast<double*>(nullptr));
    case kBFloat16:
      return f(static_cast<BFloat16*>(nullptr));
    default:
      punish("a dtype that it cannot reduce: " + std::to_string(dtype));
  }
}

}  // namespace

bool canReduce(int dtype) {
  return dtype >= 0 && dtype <= kBFloat16;
}

void reduce(const std::vector<const std::byte*>& inputs, void* to, size_t count, int dtype,
            int op) {
  withType(dtype, [&]<class T>(T*) { reduceAll<T>(inputs, to, count, op); });
}

void multiply(void* data, size_t count, int dtype, const Factor& factor) {
  withType(dtype,
           [&]<class T>(T*) { multiplyAll<T>(static_cast<std::byte*>(data), count, factor); });
}

double valueOf(const void* scalar, int dtype) {
  double value = 0;
  withType(dtype, [&]<class T>(T*) {
    value = static_cast<double>(element<T>(static_cast<const std::byte*>(scalar), 0));
  });
  return value;
}

}  // namespace fake::nccl
