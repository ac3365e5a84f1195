// Everybody's block to everybody, as all-gather and the small all-reduce need it.
//
// A rank numbers the blocks from its own: x is the block of rank + x (mod P).
#pragma once

#include <cstddef>
#include <vector>

#include "transport/transport.h"

namespace ringreduce {

struct Blocks {
  const std::byte* own;
  std::vector<std::byte*> places;  // where they go; the first is not used
  std::vector<size_t> bytes;

  const std::byte* at(size_t x) const { return x == 0 ? own : places[x]; }
};

// In few hops.  Source: Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for
// all-to-all communications in multiport message-passing systems" (1997).  A rank that has the
// blocks 0 ... n-1 sends them to the ranks n, 2n, ... (radix-1) n before it, and gets as many from
// those after it: so it has radix times as many.
void gatherByBruck(Transport& transport, const Blocks& blocks, int radix);

// Slice by slice to the next rank; what comes from the one before goes on, but for the last.
void gatherByRing(Transport& transport, const Blocks& blocks);

}  // namespace ringreduce
