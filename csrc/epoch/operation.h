// One collective call of a group: its arguments, and its deadline.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/op_signature.h"
#include "bootstrap/options.h"
#include "collectives/collectives.h"
#include "epoch/rank_map.h"

namespace ringreduce {

struct Operation {
  CollectiveCall call;
  Nanos timeout = 0;  // from when it starts to run; 0: the group's
  // Called in the same thread after it has succeeded.  It owns the buffers, so it lives as long as
  // the operation may touch them.
  std::function<void()> after = {};
  // Called in the same thread before it begins.
  std::function<void()> before = {};
  // Of its record: when it was called, and in which training step.  0: now.
  Nanos posted = 0;
  uint32_t step = 0;
};

// Throws Error(kArgument) for a call that this rank cannot perform, before anything is sent.
void validate(const Operation& operation, int rank, int world_size);

// The signature that the ranks compare with each other.
OpSignature signatureOf(const Operation& operation, uint64_t sequence);

// The memory of this rank that peers would use in place, if that is worth two rounds of flags.
SharedData sharedData(const Operation& operation, int rank);

// The bytes of this rank's elements, about.
size_t bytesOf(const Operation& operation);

// The codec of a compressed all-reduce.
std::optional<Codec> codecOf(const Operation& operation);

// The same call over a transport that numbers the ranks by their positions in a ring
// (transport/wait_guard.h). `operation` owns the buffers, so it must live as long as the result.
Operation byPositions(const Operation& operation, const std::vector<int>& ranks);

// The same call, without its `after`, in an epoch of some of the caller's ranks.  For a call that
// needs another rank, throws what `lacks` returns.
Operation toMembers(const Operation& operation, const RankMap& map,
                    const std::function<Error(int rank)>& lacks);

// Whether the call can run once more from the inputs that it left, if `overwritten` is restored:
// the memory that it both reads and writes.
struct Overwritten {
  void* data = nullptr;
  size_t bytes = 0;
};
std::optional<Overwritten> repeatable(const Operation& operation, int rank);

}  // namespace ringreduce
