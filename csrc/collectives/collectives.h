// The collectives: their arguments and their functions.  One .cc file each says how it works.
//
// Memory is the caller's and dense.  A list that is `by rank` has an entry for each rank of the
// group.  Inputs are only read; unless it is said, an output shares no memory with an input.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "base/dtype.h"
#include "collectives/communicator.h"
#include "kernels/codec.h"

namespace ringreduce {

// In place: `data` holds this rank's addends and receives the reduction over all ranks.
struct AllReduce {
  void* data;
  size_t count;
  DType dtype;
  ReduceOp op;
  double factor = 1;  // PREMUL_SUM: this rank's, applied to its addends first
};
void allReduce(Communicator&, const AllReduce&);

// Sums, or averages, of float32 that travel in fewer bytes, and not exactly: collectives/coded.h.
// A group of one has nothing to send: its input comes out as it is.
struct CompressedAllReduce {
  const float* input;
  float* output;  // may be the input
  size_t count;
  Coding coding;
  ReduceOp op;  // kSum or kAvg
  CodedSchedule schedule = CodedSchedule::kAuto;
  // If not null, memory of its own: receives what this rank's encodings lost.  What arrives is what
  // the inputs less all ranks' errors come to, but for the rounding of float32: so a rank that adds
  // its error to its next input makes up for it.  0 where the value was not finite.
  float* error = nullptr;
  // Elements for which kAuto chooses, where all messages of a caller are to go the same way; 0:
  // `count`.  The same on all ranks.
  size_t chosen_for = 0;
};
void compressedAllReduce(Communicator&, const CompressedAllReduce&);

// The reduction lands in `output` of `root`, which may be its input; the others' is not touched.
struct Reduce {
  const void* input;
  void* output;
  size_t count;
  DType dtype;
  ReduceOp op;
  int root;
  double factor = 1;
};
void reduce(Communicator&, const Reduce&);

// `output` receives the reduction of everybody's inputs[this rank], counts[this rank] elements.
// It may be that very input.
struct ReduceScatter {
  std::vector<const void*> inputs;  // by rank
  std::vector<size_t> counts;       // by rank, the same on all ranks
  void* output;
  DType dtype;
  ReduceOp op;
  double factor = 1;
};
void reduceScatter(Communicator&, const ReduceScatter&);
// The same, but what lands are partial sums (kernels/reduce.h), not rounded and not divided: for
// who adds more to them.  `output` may be the input only where these are of the dtype.
void reduceScatterSums(Communicator&, const ReduceScatter&);

// `data` of `root` is copied over everybody's.
struct Broadcast {
  void* data;
  size_t count;
  DType dtype;
  int root;
};
void broadcast(Communicator&, const Broadcast&);

// outputs[r] receives rank r's input of counts[r] elements.  An output may be the input itself.
struct AllGather {
  const void* input;
  std::vector<void*> outputs = {};  // by rank
  std::vector<size_t> counts = {};  // by rank, the same on all ranks
  DType dtype;
};
void allGather(Communicator&, const AllGather&);

// The same where a rank knows its own count only: once all are known, `place` says where each
// rank's elements go.
struct AllGatherUnknown {
  const void* input;
  size_t count;
  DType dtype;
  std::function<std::vector<void*>(const std::vector<size_t>& counts)> place;
};
void allGatherUnknown(Communicator&, const AllGatherUnknown&);

// outputs[r] of `root` receives rank r's input: `count` elements each.  The root's own may be its
// input.
struct Gather {
  const void* input;
  std::vector<void*> outputs;  // by rank; empty but for the root
  size_t count;
  DType dtype;
  int root;
};
void gather(Communicator&, const Gather&);

// `output` receives inputs[this rank] of `root`: `count` elements.  The root's may be that input.
struct Scatter {
  std::vector<const void*> inputs;  // by rank; empty but for the root
  void* output;
  size_t count;
  DType dtype;
  int root;
};
void scatter(Communicator&, const Scatter&);

// outputs[r] receives inputs[this rank] of rank r.
struct AllToAll {
  std::vector<const void*> inputs;               // by rank
  std::vector<void*> outputs;                    // by rank
  std::vector<size_t> send_counts, recv_counts;  // by rank
  bool even;  // all counts, of all ranks, are the same; where not so, the ranks tell each other
  DType dtype;
};
void allToAll(Communicator&, const AllToAll&);

// Returns when all ranks have called it.
struct Barrier {};
void barrier(Communicator&, const Barrier&);

}  // namespace ringreduce
