// The collectives for ranks that share no memory: the same functions over a Transport
// (transport/transport.h).
//
// They give the same bits as those over shared memory, refuse the same, and expect that the
// transport's begin was called; the caller calls finish, until which the call's memory is not the
// user's yet. An operation that has two collectives in it is begun once.
//
// Every rank hears from those whose data it needs, also where that is no data at all: so mistakes
// are found when there is nothing to send, too.
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

// The same between the ranks that a list names, this one among them, in that order.  An average
// divides by `world_size`: inputs may be sums of several ranks'.
struct CompressedAmong {
  CompressedAllReduce call;
  std::vector<int> ranks;
  int world_size;
  size_t slice = 0, window = 0;  // elements, and slices under way; 0: as many as fit the message
};
void compressedAllReduce(Transport&, const CompressedAmong&);

// Adds up partial sums of several hosts, as reduceScatterSums makes them, round the ring of
// `ranks`, which this rank is one of; whichever rank owns a chunk adds its own last.
struct SumsOfHosts {
  std::byte* sums;    // of the partial type; overwritten, and lent
  std::byte* output;  // may be the sums where these are of the dtype
  size_t count;
  DType dtype;
  ReduceOp op;
  std::vector<int> ranks;
  int world_size;  // addends of each element, for the average
};
void allReduceSums(Transport&, const SumsOfHosts&);

}  // namespace ringreduce
