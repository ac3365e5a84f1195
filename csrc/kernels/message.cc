// Copies runs of elements between buckets and messages, with the kernels of reductions.
#include "kernels/message.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "base/bytes.h"
#include "kernels/reduce.h"

namespace ringreduce {
namespace {

const ReduceKernels& kernelsOf(DType dtype) {
  return reduceKernels(dtype, ReduceOp::kSum);
}

// -0 of either half type: adding it changes no number, not even another -0.
constexpr size_t kNothings = 1024;
constexpr std::array<uint16_t, kNothings> kNothing = [] {
  std::array<uint16_t, kNothings> all{};
  all.fill(0x8000);
  return all;
}();

// dst[i] = src[i], rounded to the dtype.
void narrow(std::byte* dst, DType dtype, const float* src, size_t n) {
  if (dtype == DType::kFloat32) return copyBytes(dst, src, n * sizeof(float));
  const auto finish = kernelsOf(dtype).finish;
  for (size_t i = 0; i < n; i += kNothings)
    finish(dst + i * sizeOf(dtype), src + i, kNothing.data(), std::min(kNothings, n - i), 1);
}

// A word whose bits of `exponent` are all set is infinite or NaN.
template <class Word>
bool finiteWords(const void* elements, Word exponent, size_t n) {
  const auto* at = static_cast<const std::byte*>(elements);
  Word bad = 0;
  for (size_t i = 0; i < n; ++i) {
    Word word;
    std::memcpy(&word, at + i * sizeof word, sizeof word);
    bad |= static_cast<Word>((word & exponent) == exponent);
  }
  return !bad;
}

// Whether no bit but the sign is set in any word.  Most gradients differ in their first few words.
template <class Word>
bool zeroWords(const std::byte* at, size_t n) {
  constexpr size_t kLook = 256;
  constexpr Word kMagnitude = static_cast<Word>(~Word{0}) >> 1;
  for (size_t i = 0; i < n; i += kLook) {
    Word any = 0;
    for (size_t k = i; k < std::min(n, i + kLook); ++k) {
      Word word;
      std::memcpy(&word, at + k * sizeof word, sizeof word);
      any |= static_cast<Word>(word & kMagnitude);
    }
    if (any) return false;
  }
  return true;
}

const std::byte* elementsFrom(const void* bucket, DType dtype, size_t begin) {
  return static_cast<const std::byte*>(bucket) + begin * sizeOf(dtype);
}
std::byte* elementsFrom(void* bucket, DType dtype, size_t begin) {
  return static_cast<std::byte*>(bucket) + begin * sizeOf(dtype);
}

// Calls visit(message, elements, size, padded) for each run of each part.
template <class Bytes, class Visit>
void forEachRun(const MessageLayout& layout, Bytes* bucket, DType dtype, Visit visit) {
  for (size_t i = 0; i < layout.parts().size(); ++i) {
    const size_t begin = layout.parts()[i].begin;
    layout.forEachRun(i, [&](size_t message, size_t offset, size_t size, size_t padded) {
      visit(message, elementsFrom(bucket, dtype, begin + offset), size, padded);
    });
  }
}

}  // namespace

void gather(float* message, const MessageLayout& layout, const void* bucket, DType dtype,
            const float* residual) {
  const ReduceKernels& kernels = kernelsOf(dtype);
  forEachRun(layout, bucket, dtype,
             [&](size_t at, const std::byte* elements, size_t size, size_t padded) {
               if (residual)
                 kernels.combine(message + at, residual + at, elements, size);
               else
                 kernels.widen(message + at, elements, size);
               std::fill(message + at + size, message + at + padded, 0.f);
             });
}

bool scatter(void* bucket, DType dtype, const MessageLayout& layout, const float* message) {
  bool finite = true;
  forEachRun(layout, bucket, dtype, [&](size_t at, std::byte* elements, size_t size, size_t) {
    narrow(elements, dtype, message + at, size);
    finite = allFinite(elements, dtype, size) && finite;
  });
  return finite;
}

void gatherExact(std::byte* message, const MessageLayout& layout, const void* bucket, DType dtype) {
  const size_t width = sizeOf(dtype);
  forEachRun(layout, bucket, dtype,
             [&](size_t at, const std::byte* elements, size_t size, size_t padded) {
               copyBytes(message + at * width, elements, size * width);
               std::fill_n(message + (at + size) * width, (padded - size) * width, std::byte{});
             });
}

bool scatterExact(void* bucket, DType dtype, const MessageLayout& layout,
                  const std::byte* message) {
  bool finite = true;
  forEachRun(layout, bucket, dtype, [&](size_t at, std::byte* elements, size_t size, size_t) {
    copyBytes(elements, message + at * sizeOf(dtype), size * sizeOf(dtype));
    finite = allFinite(elements, dtype, size) && finite;
  });
  return finite;
}

void addTo(void* bucket, DType dtype, const MessageLayout& layout, const float* message) {
  forEachRun(layout, bucket, dtype, [&](size_t at, std::byte* elements, size_t size, size_t) {
    kernelsOf(dtype).finish(elements, message + at, elements, size, 1);
  });
}

std::vector<size_t> partsOfZeros(const MessageLayout& layout, const void* bucket, DType dtype) {
  std::vector<size_t> zeros;
  for (size_t i = 0; i < layout.parts().size(); ++i) {
    const Part& part = layout.parts()[i];
    const std::byte* elements = elementsFrom(bucket, dtype, part.begin);
    if (sizeOf(dtype) == 2 ? zeroWords<uint16_t>(elements, part.count)
                           : zeroWords<uint32_t>(elements, part.count))
      zeros.push_back(i);
  }
  return zeros;
}

void clearPart(float* message, const MessageLayout& layout, size_t i) {
  layout.forEachRun(
      i, [&](size_t at, size_t, size_t size, size_t) { std::fill_n(message + at, size, 0.f); });
}

void addPart(float* message, const MessageLayout& layout, size_t i, const float* other) {
  layout.forEachRun(i, [&](size_t at, size_t, size_t size, size_t) {
    for (size_t k = at; k < at + size; ++k) message[k] += other[k];
  });
}

bool allFinite(const void* elements, DType dtype, size_t count) {
  switch (dtype) {
    case DType::kFloat32:
      return finiteWords<uint32_t>(elements, 0x7f800000, count);
    case DType::kFloat64:
      return finiteWords<uint64_t>(elements, 0x7ff0000000000000, count);
    case DType::kFloat16:
      return finiteWords<uint16_t>(elements, 0x7c00, count);
    case DType::kBFloat16:
      return finiteWords<uint16_t>(elements, 0x7f80, count);
    default:
      return true;
  }
}

}  // namespace ringreduce
