// One rank adds what all others send it, slice by slice, in the canonical order: the small reduce
// and reduce-scatter, and the first half of two-shot.
#pragma once

#include <cstddef>
#include <vector>

#include "algorithm/cut.h"
#include "collectives/stream_slices.h"
#include "kernels/reduce.h"
#include "transport/transport.h"

namespace ringreduce {

class DirectSum {
 public:
  // Of `count` elements.  `owned_by`: the rank whose order of addition applies, or kByChunk: each
  // chunk has its owner's order.
  static constexpr int kByChunk = -1;
  DirectSum(Transport& transport, DType dtype, ReduceOp op, size_t count, int owned_by)
      : transport_(transport),
        kernels_(reduceKernels(dtype, op)),
        width_(sizeOf(dtype)),
        count_(count),
        slice_(sliceElements(count, width_)),
        slices_(slicesOf(count, slice_)),
        owned_by_(owned_by) {}

  // Call it once, before any other expectation of this rank.
  void expect() {
    for (; expected_ < slices_ && expected_ < kAhead; ++expected_) expectSlice(expected_);
  }
  // Whether all slices are expected.
  bool expectsAll() const { return expected_ == slices_; }

  // Adds all slices; `output` may be `own`.  Calls visit(span) after each slice.
  template <class Visit>
  void run(const std::byte* own, std::byte* output, Visit visit) {
    const auto P = static_cast<size_t>(transport_.size());
    std::vector<const std::byte*> sources(P);
    std::vector<const void*> ordered(P);
    const auto add = [&](int owner, size_t begin, size_t n, size_t slice_begin) {
      for (int k = 0; k < transport_.size(); ++k) {
        const auto r = static_cast<size_t>(kthToAdd(owner, k, transport_.size()));
        ordered[static_cast<size_t>(k)] = sources[r] + (begin - slice_begin) * width_;
      }
      kernels_.reduce(output + begin * width_, ordered.data(), transport_.size(), n,
                      transport_.size());
    };
    for (size_t j = 0; j < slices_; ++j) {
      const Span s = piece(count_, slice_, j);
      forEachOther([&](int r) { sources[static_cast<size_t>(r)] = transport_.peek(r); });
      sources[static_cast<size_t>(transport_.rank())] = own + s.begin * width_;
      if (owned_by_ != kByChunk)
        add(owned_by_, s.begin, s.size, s.begin);
      else
        Cut{count_, transport_.size()}.forEachChunk(
            s, [&](int chunk, size_t begin, size_t n) { add(chunk, begin, n, s.begin); });
      forEachOther([&](int r) { transport_.release(r); });
      if (expected_ < slices_) expectSlice(expected_++);
      visit(s);
    }
  }

 private:
  // Slices expected from a rank in advance: bounds the memory that a fast rank fills while this one
  // waits for a slow rank.
  static constexpr size_t kAhead = 32;

  template <class Visit>
  void forEachOther(Visit visit) {
    for (int k = 1; k < transport_.size(); ++k) visit((transport_.rank() + k) % transport_.size());
  }
  void expectSlice(size_t j) {
    forEachOther([&](int r) { transport_.expect(r, piece(count_, slice_, j).size * width_); });
  }

  Transport& transport_;
  const ReduceKernels& kernels_;
  const size_t width_, count_, slice_, slices_;
  const int owned_by_;
  size_t expected_ = 0;
};

}  // namespace ringreduce
