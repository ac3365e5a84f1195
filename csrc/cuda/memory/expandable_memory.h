// GPU memory that an allocator of this process maps into its addresses, and takes out of them,
// piece by piece: torch's expandable segments.  Here it is only known where there is some.
//
// The allocator notes what it does (torch/allocator_trace.cc), and segment_board.h lets peers map
// what tensors of calls are in.  An allocator unmaps memory of which nothing is in use, so peers
// may close it at any time after.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace ringreduce::cuda {

// What was mapped at one time and is still there.  It holds one handle of CUDA or several, whole.
struct Extent {
  uintptr_t begin, end;
  int device;
  uint64_t number = 0;  // never used twice in a process; a part that is left keeps it
};

// These only note, and call neither CUDA nor an allocator: the caller may hold any lock.
void noteMapped(int device, uintptr_t at, size_t bytes);
void noteUnmapped(uintptr_t at, size_t bytes);  // once it is
// How many notes there were, and all that is mapped, unless there were more notes since.
uint64_t notesSoFar();
bool noteAllMapped(const std::vector<Extent>& all, uint64_t notes);

// Runs `then` after memory was unmapped, under the same conditions.  Replaces an earlier `then`.
void whenUnmapped(std::function<void()> then);

// The extents that hold these bytes, side by side and of one GPU; none if they do not hold them
// all.
std::vector<Extent> extentsOf(const void* data, size_t bytes);
// Where the memory begins that reaches to `at` without a gap: at most so many bytes before.
uintptr_t beginOfRun(uintptr_t at, size_t most);
// Whether all of these addresses are still as they were in the extent with this number.
bool isThere(uintptr_t begin, uintptr_t end, uint64_t number);

}  // namespace ringreduce::cuda
