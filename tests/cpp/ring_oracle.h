// What an all-reduce of random elements (random_elements.h) must give, to the bit: computed by the
// CPU's own kernels, in the canonical order.
//
// That the CPU's ring, direct and two-shot give these bits is what its own tests show; a GPU is
// held against the same.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <thread>
#include <vector>

#include "algorithm/cut.h"
#include "base/dtype.h"
#include "bootstrap/options.h"
#include "kernels/reduce.h"
#include "random_elements.h"

namespace ring_oracle {

using namespace ringreduce;
using random_elements::Texture;

struct Case {
  int ranks;
  size_t count;
  DType dtype;
  ReduceOp op;
  double factor = 1;  // PREMUL_SUM
  Texture draw = Texture::kRough;
  uint32_t seed = 0;
  size_t chunk = 0;  // elements of a chunk, if not of the canonical cut: a reduce-scatter's part
};

// The chunks of a part of the message, one after the other.
class Oracle {
 public:
  explicit Oracle(const Case& c) : case_(c), kernels_(reduceKernels(c.dtype, c.op)) {
    addends_.resize(static_cast<size_t>(c.ranks), std::vector<std::byte>(kTile * 8));
    for (auto& one : addends_) sources_.push_back(one.data());
  }

  void run(Span part, std::byte* out) {
    for (size_t at = part.begin; at < part.end(); at += kTile)
      forEachPiece({at, std::min(kTile, part.end() - at)},
                   case_.chunk ? case_.chunk : Cut{case_.count, case_.ranks}.chunkSize(),
                   [&](int chunk, size_t begin, size_t n) { tile(chunk, begin, n, out); });
  }

 private:
  static constexpr size_t kTile = 4096;  // in cache, for some ranks

  void tile(int chunk, size_t begin, size_t n, std::byte* out) {
    const Case& c = case_;
    for (int k = 0; k < c.ranks; ++k) {
      auto* addend = addends_[static_cast<size_t>(k)].data();
      const int rank = kthToAdd(chunk, k, c.ranks);
      random_elements::fill(c.dtype, addend, begin, n, c.draw,
                            random_elements::keyOf(c.seed, rank));
      if (c.op == ReduceOp::kPremulSum) scale(c.dtype, addend, addend, n, c.factor);
    }
    kernels_.reduce(out + begin * sizeOf(c.dtype), sources_.data(), c.ranks, n, c.ranks);
  }

  const Case case_;
  const ReduceKernels& kernels_;
  std::vector<std::vector<std::byte>> addends_;
  std::vector<const void*> sources_;
};

// The whole of it into `out`, by all cores if it is much.
inline void expect(const Case& c, void* out) {
  constexpr size_t kEach = size_t{64} << 10;
  const size_t threads =
      std::clamp<size_t>(c.count / kEach, 1, static_cast<size_t>(coresAvailable()));
  const size_t part = roundUp(ceilDiv(c.count, threads), kChunkElements);
  const auto run = [&](size_t i) {
    Oracle(c).run(piece(c.count, part, i), static_cast<std::byte*>(out));
  };
  std::vector<std::thread> others;
  for (size_t i = 1; i < threads; ++i) others.emplace_back(run, i);
  run(0);
  for (std::thread& thread : others) thread.join();
}

// Whether two elements are the same: bit for bit, or both NaN.
inline bool same(DType dtype, const void* a, const void* b) {
  bool equal = false;
  random_elements::withDType(dtype, [&]<DType t>() {
    typename random_elements::Random<t>::Stored x, y;
    std::memcpy(&x, a, sizeof x);
    std::memcpy(&y, b, sizeof y);
    equal = random_elements::same<t>(x, y);
  });
  return equal;
}

}  // namespace ring_oracle
