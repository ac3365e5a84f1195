// The ring all-reduce, written once.
//
// Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
// workstations" (2009); the primitives follow NCCL's.  Chunk c starts at rank c+1, gathers one
// addend a hop, is complete at its owner c, and goes round once more as a copy.  At rank r, for
// each slice:
//
//     send                 chunk r-1                    (first hop)
//     recvReduceSend       chunks r-2 ... r-P+1         (P-2 hops that add)
//     recvReduceCopySend   chunk r                      (complete: keep it, pass it on)
//     recvCopySend         chunks r-1 ... r-P+2         (P-2 hops that copy)
//     recv                 chunk r+1                    (last hop)
//
// Pipelining is a window of W slices: W are sent first; from then on every received slice lets the
// next be sent, so that W are always in flight and the link is never idle.  A link needs more than
// W slots: a receive always precedes a send, so with at most P*W slices in the ring and more than W
// slots a link, some rank can always proceed.
//
// `Primitives` moves and adds data: for a CPU thread in shared memory (collectives/reduction.h),
// over streams (collectives/stream_algorithms.h), of coded messages
// (collectives/compressed_all_reduce.cc), and for a thread block of a GPU
// (cuda/kernels/ring_kernel.h).
#pragma once

#include <cstddef>

#include "base/bytes.h"

namespace ringreduce {

struct RingShape {
  int rank, world_size;  // world_size >= 2
  size_t slices;         // a chunk; the same on all ranks
  size_t window;         // slices in flight, at least 1
};

template <class Primitives>
RINGREDUCE_DEVICE void runRing(Primitives& p, const RingShape& shape) {
  const int P = shape.world_size;
  const auto chunk = [&](int offset) { return (shape.rank + offset + P) % P; };
  const auto least = [](size_t a, size_t b) { return a < b ? a : b; };

  for (size_t j = 0; j < least(shape.window, shape.slices); ++j) p.send(chunk(-1), j);
  for (size_t first = 0; first < shape.slices; first += shape.window) {
    const size_t last = least(first + shape.window, shape.slices);
    for (int k = 2; k < P; ++k)
      for (size_t j = first; j < last; ++j) p.recvReduceSend(chunk(-k), j);
    for (size_t j = first; j < last; ++j) p.recvReduceCopySend(chunk(0), j);
    for (int k = 1; k < P - 1; ++k)
      for (size_t j = first; j < last; ++j) p.recvCopySend(chunk(-k), j);
    for (size_t j = first; j < last; ++j) {
      p.recv(chunk(1), j);
      if (j + shape.window < shape.slices) p.send(chunk(-1), j + shape.window);
    }
  }
}

}  // namespace ringreduce
