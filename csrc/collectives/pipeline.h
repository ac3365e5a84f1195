// Going through the slices of a message over the exchange, a few of them ahead.
#pragma once

#include <algorithm>
#include <cstdint>

#include "transport/shm/exchange.h"

namespace ringreduce {

// A few fills first, then alternately one fill and one `rest`: a slice is in its slot well before
// peers look for it.  A rank fills at most this many slices more than it is done with, which leaves
// room for those that slower ranks still read, and in two-shot for the one still to be collected.
template <class Fill, class Rest>
void pipeline(const Exchange& exchange, uint64_t slices, Fill fill, Rest rest) {
  const auto ahead = static_cast<uint64_t>(std::max(1, exchange.depth() / 2 - 1));
  for (uint64_t j = 0; j < std::min(ahead, slices); ++j) fill(j);
  for (uint64_t j = 0; j < slices; ++j) {
    if (j + ahead < slices) fill(j + ahead);
    rest(j);
  }
}

}  // namespace ringreduce
