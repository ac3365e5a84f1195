// A hash of a few integers: enough to see that two lists differ, no more.
#pragma once

#include <cstdint>

namespace ringreduce {

// The hash of a list that goes on with `word`.  (FNV-1a's mixing step, over whole words.)
constexpr uint64_t mixed(uint64_t hash, uint64_t word) {
  return (hash ^ word) * 0x100000001b3;
}

}  // namespace ringreduce
