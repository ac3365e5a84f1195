// All-gather of blocks, for the all-gather and the small all-reduce.
//
// A rank numbers blocks from its own: block x belongs to rank + x (mod P).
#pragma once

#include <cstddef>
#include <vector>

#include "transport/transport.h"

namespace ringreduce {

struct Blocks {
  const std::byte* own;
  std::vector<std::byte*> places;  // destinations; the first is not used
  std::vector<size_t> bytes;

  const std::byte* at(size_t x) const { return x == 0 ? own : places[x]; }
};

// Few steps.  Source: Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all
// communications in multiport message-passing systems" (1997).  A rank that has the blocks 0 ...
// n-1 sends them to the ranks n, 2n, ... (radix-1) n before it, and receives as many from those
// after it: each step multiplies the number of blocks by the radix.
void gatherByBruck(Transport& transport, const Blocks& blocks, int radix);

// Slice by slice round the ring: each rank forwards the blocks that it receives, except the last.
void gatherByRing(Transport& transport, const Blocks& blocks);

}  // namespace ringreduce
