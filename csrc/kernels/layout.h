// How the gradients of a bucket lie in the message that they travel in.
//
// Each parameter is cut for itself, as a message of its own would be (algorithm/cut.h), and part c
// of all of them makes the message's chunk c.  So which rank owns an element, with which others it
// shares a block, and in which order it is added depend on its parameter alone: neither the order
// of parameters in a bucket nor the size of buckets changes a bit of the result.  Parts are padded
// with zeros to the same size for all ranks, a multiple of 128 elements.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "algorithm/cut.h"

namespace ringreduce {

// Where a parameter's gradient lies in a bucket, in elements.
struct Part {
  size_t parameter;  // its number
  size_t begin, count;
  bool operator==(const Part&) const = default;
};

class MessageLayout {
 public:
  MessageLayout(std::vector<Part> parts, int world_size)
      : parts_(std::move(parts)), world_size_(world_size) {
    for (const Part& part : parts_) {
      places_.push_back(chunk_);
      chunk_ += Cut{part.count, world_size}.chunkSize();
    }
  }

  const std::vector<Part>& parts() const { return parts_; }
  // Elements of the message, padding included: as many in each rank's chunk.
  size_t count() const { return chunk_ * static_cast<size_t>(world_size_); }

  // Calls visit(message, offset, size, padded) for each run of part `i`: `size` elements of the
  // parameter from `offset` on lie at `message`, and zeros behind them until there are `padded`.
  template <class Visit>
  void forEachRun(size_t i, Visit visit) const {
    const Cut cut{parts_[i].count, world_size_};
    for (int c = 0; c < world_size_; ++c) {
      const Span span = cut.chunk(c);
      visit(static_cast<size_t>(c) * chunk_ + places_[i], span.begin, span.size, cut.chunkSize());
    }
  }

  bool operator==(const MessageLayout&) const = default;

 private:
  std::vector<Part> parts_;
  int world_size_;
  std::vector<size_t> places_;  // of each part in every chunk
  size_t chunk_ = 0;            // elements
};

}  // namespace ringreduce
