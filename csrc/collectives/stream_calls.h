// The collectives for ranks that share no memory: the same functions over a Transport.
//
// They give the same bits as those over shared memory and refuse the same arguments.  The caller
// calls the transport's begin before and finish after; until then the call's memory is lent.  Two
// collectives in one operation share one begin.
//
// Every rank receives from each rank whose data it needs, even if that is empty.  So ranks that
// disagree find out in every call.
#pragma once

#include "collectives/collectives.h"
#include "transport/transport.h"

namespace ringreduce {

void allReduce(Transport&, const AllReduce&);
void reduce(Transport&, const Reduce&);
void reduceScatter(Transport&, const ReduceScatter&);
void broadcast(Transport&, const Broadcast&);
void allGather(Transport&, const AllGather&);
void allGatherUnknown(Transport&, const AllGatherUnknown&);
void gather(Transport&, const Gather&);
void scatter(Transport&, const Scatter&);
void allToAll(Transport&, const AllToAll&);
void barrier(Transport&, const Barrier&);
void compressedAllReduce(Transport&, const CompressedAllReduce&);

// The same between the ranks of a list, this one among them, in that order.  An average divides by
// `world_size`: inputs may be sums of several ranks.
struct CompressedAmong {
  CompressedAllReduce call;
  std::vector<int> ranks;
  int world_size;
  size_t slice = 0, window = 0;  // elements, and slices in flight; 0: chosen for the message
};
void compressedAllReduce(Transport&, const CompressedAmong&);

// Adds partial sums of several hosts (see reduceScatterSums) round the ring of `ranks`, this one
// among them.  The owner of a chunk adds its own last.
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
