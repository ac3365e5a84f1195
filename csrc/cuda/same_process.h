// What ranks that are threads of one process share: the process, and memory by its pointer.
#pragma once

#include <array>
#include <cstdint>

#include "cuda/device_memory.h"

namespace ringreduce::cuda {

// Random; no other process has it, nor a forked child.
std::array<uint64_t, 2> processToken();

// Memory that another rank of this process may take part in: that rank is told the ticket, and owns
// the memory with this one once it has taken it.  A ticket is good while its memory lives.
uint64_t offer(const MemoryPtr& memory);
MemoryPtr take(uint64_t ticket);  // throws Error(kSetup) if there is none such

}  // namespace ringreduce::cuda
