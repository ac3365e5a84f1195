// The five ring primitives (algorithm/ring.h) for a CPU: slots of links, and the reduction kernels.
//
// On their way to the owner, halves travel as float32 (the kernels' partial type): they are rounded
// once, by the owner.  From there on the finished values travel as they are.
#pragma once

#include <cstddef>

#include "algorithm/cut.h"
#include "algorithm/ring.h"
#include "base/bytes.h"
#include "collectives/collectives.h"
#include "collectives/communicator.h"
#include "kernels/reduce.h"

namespace ringreduce {

class HostPrimitives {
 public:
  // `slice` is in elements; a slice of the partial type fits a slot.
  HostPrimitives(Communicator& c, const AllReduce& a, const ReduceKernels& kernels, size_t slice)
      : c_(c),
        kernels_(kernels),
        data_(static_cast<std::byte*>(a.data)),
        width_(sizeOf(a.dtype)),
        slice_(slice),
        cut_{a.count, c.size} {}

  void send(int chunk, size_t j) {
    const Span s = span(chunk, j);
    kernels_.widen(c_.next.acquire(), at(s), s.size);
    c_.next.post();
  }

  void recvReduceSend(int chunk, size_t j) {
    const Span s = span(chunk, j);
    const std::byte* in = peek();
    kernels_.combine(c_.next.acquire(), in, at(s), s.size);
    c_.prev.release();
    c_.next.post();
  }

  void recvReduceCopySend(int chunk, size_t j) {
    const Span s = span(chunk, j);
    kernels_.finish(at(s), peek(), at(s), s.size, c_.size);
    c_.prev.release();
    copyBytes(c_.next.acquire(), at(s), s.size * width_);
    c_.next.post();
  }

  void recvCopySend(int chunk, size_t j) {
    recv(chunk, j);
    const Span s = span(chunk, j);
    copyBytes(c_.next.acquire(), at(s), s.size * width_);
    c_.next.post();
  }

  void recv(int chunk, size_t j) {
    const Span s = span(chunk, j);
    const std::byte* in = peek();
    copyBytes(at(s), in, s.size * width_);
    c_.prev.release();
  }

 private:
  // Slice j of a chunk; empty where this chunk is shorter than the first.
  Span span(int chunk, size_t j) const {
    const Span whole = cut_.chunk(chunk);
    Span s = piece(whole.size, slice_, j);
    s.begin += whole.begin;
    return s;
  }

  std::byte* at(Span s) const { return data_ + s.begin * width_; }

  const std::byte* peek() {
    const std::byte* slot = c_.prev.peek();
    if (!verified_) {
      c_.watch.verify(c_.previousRank());
      verified_ = true;
    }
    return slot;
  }

  Communicator& c_;
  const ReduceKernels& kernels_;
  std::byte* const data_;
  const size_t width_, slice_;
  const Cut cut_;
  bool verified_ = false;
};

}  // namespace ringreduce
