// Direct and two-shot.  What they do about lost ranks is in reduction.h.
#include "collectives/reduction.h"

#include <algorithm>

#include "base/bytes.h"
#include "base/stream_copy.h"
#include "collectives/shared_memory.h"

namespace ringreduce {

Reduction::Reduction(OverMemory& c, const Reducible& r)
    : c_(c),
      r_(r),
      kernels_(reduceKernels(r.dtype, r.op)),
      cut_{r.count, c.size},
      width_(sizeOf(r.dtype)),
      slice_(c.exchange.slotBytes() / width_ / kChunkElements * kChunkElements),
      // Zero elements take a step as well: so the ranks compare their calls.
      slices_(std::max<uint64_t>(1, ceilDiv(r.count, slice_))),
      first_(c.exchange.begin(slices_)),
      sources_(static_cast<size_t>(c.size)),
      ordered_(static_cast<size_t>(c.size)) {}

void Reduction::direct() {
  const auto fill = [&](uint64_t j) {
    const Span s = slice(j);
    if (wantedByOthers())
      copyBytes(c_.exchange.acquire(first_ + j), input(s.begin), s.size * width_);
    c_.exchange.post(first_ + j);
  };
  pipeline(c_.exchange, slices_, fill, [&](uint64_t j) {
    if (wanted()) {
      gatherSources(j);
      reduce(slice(j), output(slice(j).begin), j);
    }
    c_.exchange.release(first_ + j);
  });
}

void Reduction::twoShot() {
  const auto fill = [&](uint64_t j) {
    std::byte* slot = c_.exchange.acquire(first_ + j);
    for (int p = 0; p < c_.size; ++p) {
      if (p == c_.rank) continue;
      const Span theirs = part(j, p);
      copyBytes(slot + inSlot(theirs.begin, j), input(theirs.begin), theirs.size * width_);
    }
    c_.exchange.post(first_ + j);
  };
  const auto add = [&](uint64_t j) {
    gatherSources(j);
    const Span mine = part(j, c_.rank);
    std::byte* in_slot = c_.exchange.own(first_ + j) + inSlot(mine.begin, j);
    reduce(mine, wanted() ? output(mine.begin) : in_slot, j);
    if (wanted() && wantedByOthers()) copyBytes(in_slot, output(mine.begin), mine.size * width_);
    c_.exchange.share(first_ + j);
  };
  const auto collect = [&](uint64_t j) {
    for (int k = 1; k < c_.size && wanted(); ++k) {
      const int p = (c_.rank + k) % c_.size;
      const Span theirs = part(j, p);
      if (const std::byte* slot = c_.exchange.shared(p, first_ + j)) {
        copyBytes(output(theirs.begin), slot + inSlot(theirs.begin, j), theirs.size * width_);
      } else {
        gatherSources(j);
        reduce(theirs, output(theirs.begin), j, p);
      }
    }
    c_.exchange.release(first_ + j);
  };
  pipeline(c_.exchange, slices_, fill, [&](uint64_t j) {
    add(j);
    if (j > 0) collect(j - 1);
  });
  collect(slices_ - 1);
}

Span Reduction::part(uint64_t j, int p) const {
  const Span s = slice(j);
  const size_t step = roundUp(ceilDiv(s.size, static_cast<size_t>(c_.size)), kChunkElements);
  Span span = piece(s.size, step, static_cast<size_t>(p));
  span.begin += s.begin;
  return span;
}

void Reduction::gatherSources(uint64_t j) {
  for (int k = 1; k < c_.size; ++k) {
    const int r = (c_.rank + k) % c_.size;
    sources_[static_cast<size_t>(r)] = c_.exchange.find(r, first_ + j);
  }
}

void Reduction::reduce(Span span, std::byte* dst, uint64_t j, int excluded) {
  cut_.forEachChunk(span, [&](int chunk, size_t begin, size_t n) {
    int addends = 0;
    for (int k = 0; k < c_.size; ++k) {
      const int r = kthToAdd(chunk, k, c_.size, c_.order);
      const std::byte* const slot = sources_[static_cast<size_t>(r)];
      if (r == c_.rank)
        ordered_[static_cast<size_t>(addends++)] = input(begin);
      else if (slot && r != excluded)
        ordered_[static_cast<size_t>(addends++)] = slot + inSlot(begin, j);
    }
    kernels_.reduce(dst + (begin - span.begin) * width_, ordered_.data(), addends, n, addends);
  });
}

void reduceInPlace(OverMemory& c, const std::vector<std::byte*>& data, size_t count, DType dtype,
                   ReduceOp op, int root) {
  const ReduceKernels& kernels = reduceKernels(dtype, op);
  const size_t width = sizeOf(dtype), tile = kTileBytes / width;
  const Span chunk = Cut{count, c.size}.chunk(c.rank);
  const int first = root == Reducible::kEverybody ? c.rank : root;
  std::vector<const void*> ordered(data.size());
  for (size_t at = chunk.begin; at < chunk.end(); at += tile) {
    const size_t n = std::min(tile, chunk.end() - at);
    for (int k = 0; k < c.size; ++k)
      ordered[static_cast<size_t>(k)] =
          data[static_cast<size_t>(kthToAdd(c.rank, k, c.size, c.order))] + at * width;
    std::byte* const result = data[static_cast<size_t>(first)] + at * width;
    kernels.reduce(result, ordered.data(), c.size, n, c.size);
    for (int k = 1; k < c.size && root == Reducible::kEverybody; ++k)
      copyBytes(data[static_cast<size_t>((c.rank + k) % c.size)] + at * width, result, n * width);
  }
}

}  // namespace ringreduce
