// One collective call: which, with what arguments, and by when.
#pragma once

#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "base/op_signature.h"
#include "collectives/collectives.h"

namespace ringreduce {

class Transport;

// An all-gather of what ranks have of a sparse tensor: of `count` elements were it dense, and of a
// shape that `shape` is a hash of.
struct SparseAllReduce {
  AllGatherUnknown gather;
  size_t count;
  DType dtype;
  ReduceOp op;
  uint64_t shape = 0;
};

// A barrier whose error tells the absent ranks in the words of torch's monitored_barrier.
struct MonitoredBarrier {};

struct Operation {
  std::variant<AllReduce, Reduce, ReduceScatter, Broadcast, AllGather, Gather, Scatter, AllToAll,
               Barrier, SparseAllReduce, MonitoredBarrier, CompressedAllReduce>
      call;
  Nanos timeout = 0;  // from when it starts to run; 0: the group's
  // Called in the same thread once it has succeeded; what it holds, the buffers' owners, lives as
  // long as the operation may touch them.
  std::function<void()> after = {};
  // Called in the same thread before it begins.
  std::function<void()> before = {};
};

// Throws Error(kArgument) for what this rank cannot do, before anything is sent.
void validate(const Operation& operation, int rank, int world_size);

// What the ranks compare with each other.
OpSignature announce(const Operation& operation, uint64_t sequence);

// The same call as a transport sees it whose ranks stand in another order (transport/wait_guard.h).
// What `operation` holds must live as long.
Operation inPlaces(const Operation& operation, const std::vector<int>& ranks);

void run(Communicator& c, const Operation& operation);
void run(Transport& transport, const Operation& operation);

}  // namespace ringreduce
