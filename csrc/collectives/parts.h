// A slot shared out between the other ranks: one part for each, all of the same size.
#pragma once

#include <cstddef>

#include "base/error.h"
#include "collectives/communicator.h"

namespace ringreduce {

class Parts {
 public:
  // For elements of `width` bytes.  Throws where a slot is too small to hold one for each rank.
  Parts(const Communicator& c, size_t width) : rank_(c.rank), size_(c.size) {
    const size_t even = c.exchange.slotBytes() / static_cast<size_t>(c.size > 1 ? c.size - 1 : 1);
    bytes_ = even >= kLine ? even / kLine * kLine : even / width * width;
    elements_ = bytes_ / width;
    if (elements_ == 0)
      throw Error(Failure::kArgument, "a slot of " + std::to_string(c.exchange.slotBytes()) +
                                          " bytes is too small for " + std::to_string(c.size) +
                                          " ranks; set RINGREDUCE_SLOT_BYTES higher");
  }

  size_t elements() const { return elements_; }  // that a part holds

  // This rank's slot: the part for rank `to`.
  std::byte* outgoing(std::byte* slot, int to) const { return slot + at(rank_, to); }
  // The slot of rank `from`: the part for this rank.
  const std::byte* incoming(const std::byte* slot, int from) const {
    return slot + at(from, rank_);
  }

 private:
  size_t at(int from, int to) const {
    return static_cast<size_t>((to - from - 1 + size_) % size_) * bytes_;
  }

  const int rank_, size_;
  size_t bytes_, elements_;
};

}  // namespace ringreduce
