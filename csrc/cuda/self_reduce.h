// What the kernels of the direct schedule are told where each rank leads for itself: a piece of a
// reduce-scatter, an all-gather or a broadcast, as much as the memory to be staged in holds at
// once.
#pragma once

#include <cstddef>

#include "algorithm/cut.h"
#include "cuda/direct.h"
#include "cuda/layout.h"

namespace ringreduce::cuda {

// Each rank's memory to be staged in, as mapped here, and who asks.
struct StagedAt {
  int rank, size;
  std::byte* base[kMostRanks];
  uint64_t* abort;  // this rank's
};

// Of a reduce-scatter of parts of `count` elements, the elements `piece` of every part are staged
// at once, part after part.  Calls copy(element of the input, element of the staged, how many).
template <class Copy>
void stageParts(int size, size_t count, Span piece, Copy copy) {
  const auto parts = static_cast<size_t>(size);
  if (piece.size == count) return copy(size_t{0}, size_t{0}, parts * count);
  for (size_t p = 0; p < parts; ++p) copy(p * count + piece.begin, p * piece.size, piece.size);
}

// This rank's part of all of them is added into its output.
inline DirectCall addParts(const StagedAt& staged, void* output, size_t count, Span piece,
                           size_t width, const Arithmetic& arithmetic) {
  const auto mine = static_cast<size_t>(staged.rank);
  const size_t begin = mine * count + piece.begin;
  DirectCall call{.size = staged.size,
                  .sinks = 1,
                  .chunk = count,  // each part is one
                  .begin = begin,
                  .elements = piece.size,
                  .first = begin,
                  .inputs = {},
                  .outputs = {static_cast<std::byte*>(output) + piece.begin * width},
                  .arithmetic = arithmetic,
                  .abort = staged.abort};
  for (int r = 0; r < staged.size; ++r) call.inputs[r] = staged.base[r] + mine * piece.size * width;
  return call;
}

// Bytes from one place to another, if it is another.
inline CarryCall carryOne(const StagedAt& staged, const std::byte* from, std::byte* to,
                          size_t bytes) {
  return {.places = from != to, .from = {from}, .to = {to}, .bytes = bytes, .abort = staged.abort};
}

// The bytes `piece` of everybody's part, of `part` bytes: this rank's from its input, the others'
// from where they staged them.
inline CarryCall gatherParts(const StagedAt& staged, const void* input, void* output, size_t part,
                             Span piece) {
  CarryCall call{.places = 0, .from = {}, .to = {}, .bytes = piece.size, .abort = staged.abort};
  for (int r = 0; r < staged.size; ++r) {
    const std::byte* from =
        r == staged.rank ? static_cast<const std::byte*>(input) + piece.begin : staged.base[r];
    std::byte* to = static_cast<std::byte*>(output) + static_cast<size_t>(r) * part + piece.begin;
    if (from == to) continue;
    call.from[call.places] = from;
    call.to[call.places++] = to;
  }
  return call;
}

}  // namespace ringreduce::cuda
