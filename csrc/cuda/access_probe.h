// Trying one way to each other's memory, on all ranks at the same time.
#pragma once

#include <string>
#include <vector>

#include "cuda/peer_memory.h"

namespace ringreduce::cuda {

// Collective.  Fills in `state`, whose way is set, with memory of at least `bytes`; of a multiple
// of `granularity` where it is exported.  Returns "" if every rank reaches every piece, else, on
// all ranks, what stands against it.  Throws the same Error on all ranks where no other way would
// do better: a GPU without memory left, a process whose CUDA is ruined.
std::string tryAccess(Group& group, PeerMemory::State& state, size_t bytes, size_t granularity,
                      const std::vector<std::string>& names);

}  // namespace ringreduce::cuda
