// What torch's allocator maps and unmaps, told to cuda/memory/expandable_memory.h.
#pragma once

namespace ringreduce {

// From the first call to the end of the process.  Only in builds with CUDA.
void followAllocator();

}  // namespace ringreduce
