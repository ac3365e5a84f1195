// The collectives between ranks that share no memory: the functions of collectives.h over a
// Transport (transport/transport.h), and two that only the hierarchy calls.
//
// They give the same bits as those over shared memory and refuse the same calls.  The caller calls
// the transport's begin before and finish after; until then the transport uses the call's memory.
// An operation of two collectives begins once.
//
// A rank receives from each rank whose data it needs, even if that is no data: so a mismatch is
// found also where there is nothing to send.
#pragma once

#include "collectives/collectives.h"
#include "transport/transport.h"

namespace ringreduce {

// A compressed all-reduce between the ranks of a list, this one among them, in that order.  An
// average divides by `world_size`: inputs may be sums of several ranks'.
struct CompressedAmong {
  CompressedAllReduce call;
  std::vector<int> ranks;
  int world_size;
  size_t slice = 0, window = 0;  // elements, and slices in flight; 0: chosen for the message
};
void compressedAllReduce(Transport&, const CompressedAmong&);

// Adds up partial sums of several hosts, as reduceScatterSums makes them, round the ring of
// `ranks`, this rank among them.  The owner of a chunk adds its own sums last.
struct SumsOfHosts {
  std::byte* sums;    // of the partial type; overwritten, and lent
  std::byte* output;  // may be `sums` if these have the same dtype
  size_t count;
  DType dtype;
  ReduceOp op;
  std::vector<int> ranks;
  int world_size;  // addends of each element, for the average
};
void allReduceSums(Transport&, const SumsOfHosts&);

}  // namespace ringreduce
