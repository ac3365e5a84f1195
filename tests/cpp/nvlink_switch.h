// The NVSwitch's part of an all-reduce (csrc/cuda/kernels/nvls.h), on the host: it adds in the
// order of ranks, in float32, and rounds once.  A real one promises no order.
#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>

#include "cuda/kernels/elements.h"
#include "cuda/kernels/nvls.h"

namespace nvlink {

using namespace ringreduce;
using namespace ringreduce::cuda;

// The sum of `ranks` packs; pack(r) is rank r's.
template <DType dtype, class PackOf>
Pack sumOf(int ranks, PackOf pack) {
  using E = Element<dtype>;
  constexpr size_t kPer = sizeof(Pack) / sizeof(typename E::Stored);
  const auto read = [&](int r, auto(&elements)[kPer]) {
    const Pack one = pack(r);
    std::memcpy(elements, &one, sizeof one);
  };
  typename E::Stored elements[kPer];
  typename E::Value sums[kPer];
  for (int r = 0; r < ranks; ++r) {
    read(r, elements);
    for (size_t v = 0; v < kPer; ++v)
      sums[v] = r == 0 ? E::widen(elements[v]) : E::add(sums[v], E::widen(elements[v]));
  }
  for (size_t v = 0; v < kPer; ++v) elements[v] = E::narrow(sums[v]);
  Pack sum;
  std::memcpy(&sum, elements, sizeof sum);
  return sum;
}

// The windows of some ranks, behind the addresses that stand for all of them.  So an address is
// enough to find every rank's place.
class Windows {
 public:
  static constexpr size_t kBytes = size_t{256} << 10;

  explicit Windows(int ranks) {
    const size_t bytes = (static_cast<size_t>(ranks) + 1) * kBytes;
    memory_.reset(static_cast<std::byte*>(std::aligned_alloc(kBytes, bytes)));
    std::memset(memory_.get(), 0, bytes);
    std::memcpy(memory_.get(), &ranks, sizeof ranks);
  }
  Window of(int rank) const { return {ownOf(memory_.get(), rank), memory_.get()}; }
  static int ranksAt(const void* everyone) {
    int ranks = 0;
    std::memcpy(&ranks, baseOf(everyone), sizeof ranks);
    return ranks;
  }
  static Pack* placeAt(const void* everyone, int rank) {
    std::byte* const base = baseOf(everyone);
    const size_t offset = static_cast<size_t>(static_cast<const std::byte*>(everyone) - base);
    return reinterpret_cast<Pack*>(ownOf(base, rank) + offset);
  }

 private:
  static std::byte* ownOf(std::byte* base, int rank) {
    return base + (static_cast<size_t>(rank) + 1) * kBytes;
  }
  static std::byte* baseOf(const void* everyone) {
    const auto at = reinterpret_cast<uintptr_t>(everyone);
    return reinterpret_cast<std::byte*>(at / kBytes * kBytes);
  }
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<std::byte, Free> memory_;
};

}  // namespace nvlink
