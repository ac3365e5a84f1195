// A codec that keeps a share of a message: the elements of greatest magnitude of each block, as
// their places, their signs, and which of the block's two magnitudes they have.  docs/diloco.md
// describes the layout.  Coded messages are not added up on their way, as those of codec.h are:
// each rank decodes those of all ranks.
//
// The coded size depends on the count and the share alone.  Equal values give equal bytes on every
// machine in the same mode for subnormals: this is plain code, which is compiled once.  A zero
// decodes as a zero, so a parameter that no rank has moved stays as it is.  Finite values decode as
// finite ones.  A block with an infinity or a NaN becomes NaN as a whole.
//
// A share is above 0, and 1 at most.  Nothing here allocates, blocks or throws.
#pragma once

#include <cstddef>

namespace ringreduce {

// Elements that share magnitudes.  The last block of a message may have fewer.
inline constexpr size_t kSparseBlock = 4096;

// The coded size of `count` elements.
size_t sparseBytes(size_t count, double share);

// `out` has sparseBytes(n, share).  `error` may be null, or `in` itself: it receives in[i] minus
// the decoded value, and 0 where that is not finite.  No other overlap.
void sparseEncode(std::byte* out, float* error, const float* in, size_t n, double share);

// Adds the decoded values.  Returns false, with `sum` unspecified, if `bytes` is not
// sparseBytes(n, share) or no encoder makes one of the blocks.  Reads at most `bytes`.
bool sparseDecodeAdd(float* sum, const std::byte* in, size_t bytes, size_t n, double share);

}  // namespace ringreduce
