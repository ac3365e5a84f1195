// Copies runs of elements between buckets and messages, with the kernels of reductions.
#include "kernels/message.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

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

namespace {

// An element that is not finite would spoil all later steps, so it is dropped.
float kept(float value) {
  return std::isfinite(value) ? value : 0.f;
}

}  // namespace

Residuals::Residuals(std::vector<size_t> counts) {
  for (size_t count : counts) entries_.push_back({.count = count});
}

std::shared_ptr<Residuals::Store> Residuals::storeOf(const MessageLayout& layout) {
  const std::shared_ptr<Store> known = entries_.at(layout.parts().at(0).parameter).store;
  // A step that ended early may have moved only some of the parameters to other stores.
  const auto is_there = [&](const Part& part) { return entries_[part.parameter].store == known; };
  if (known && known->layout == layout && std::ranges::all_of(layout.parts(), is_there))
    return known;

  const auto made = std::make_shared<Store>(
      Store{layout, std::vector<float>(layout.count(), 0), std::vector<float>(layout.count(), 0)});
  std::vector<float> values;
  for (size_t i = 0; i < layout.parts().size(); ++i) {
    const size_t parameter = layout.parts()[i].parameter;
    Entry& entry = entries_.at(parameter);
    values.resize(entry.count);
    if (read(parameter, values.data()))
      layout.forEachRun(i, [&](size_t at, size_t offset, size_t size, size_t) {
        std::copy_n(values.data() + offset, size, made->kept.data() + at);
      });
    entry = {.count = entry.count, .store = made, .place = i};
  }
  return made;
}

bool Residuals::read(size_t parameter, float* to) const {
  const Entry& entry = entries_.at(parameter);
  if (entry.store) {
    entry.store->layout.forEachRun(entry.place, [&](size_t at, size_t offset, size_t size, size_t) {
      std::copy_n(entry.store->kept.data() + at, size, to + offset);
    });
    return true;
  }
  if (entry.loose.empty()) return false;
  std::copy(entry.loose.begin(), entry.loose.end(), to);
  return true;
}

void Residuals::write(size_t parameter, const float* from) {
  Entry& entry = entries_.at(parameter);
  if (entry.store) {
    entry.store->layout.forEachRun(entry.place, [&](size_t at, size_t offset, size_t size, size_t) {
      float* const to = entry.store->kept.data() + at;
      if (from)
        std::transform(from + offset, from + offset + size, to, kept);
      else
        std::fill_n(to, size, 0.f);
    });
  } else if (from) {
    entry.loose.resize(entry.count);
    std::transform(from, from + entry.count, entry.loose.begin(), kept);
  } else {
    entry.loose.clear();
  }
}

void Residuals::scale(float factor) {
  for (const auto& store : stores())
    for (float& value : store->kept) value = kept(value * factor);
  for (Entry& entry : entries_)
    for (float& value : entry.loose) value = kept(value * factor);
}

void Residuals::clear() {
  for (Entry& entry : entries_) entry = {.count = entry.count};
}

bool Residuals::empty() const {
  return std::all_of(entries_.begin(), entries_.end(),
                     [](const Entry& e) { return !e.store && e.loose.empty(); });
}

size_t Residuals::bytes() const {
  size_t elements = 0;
  for (const auto& store : stores()) elements += store->kept.size() + store->made.size();
  for (const Entry& entry : entries_) elements += entry.loose.size();
  return elements * sizeof(float);
}

std::vector<std::shared_ptr<Residuals::Store>> Residuals::stores() const {
  std::vector<std::shared_ptr<Store>> all;
  for (const Entry& entry : entries_)
    if (entry.store && std::find(all.begin(), all.end(), entry.store) == all.end())
      all.push_back(entry.store);
  return all;
}

}  // namespace ringreduce
