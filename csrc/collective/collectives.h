// The collectives: their arguments and their functions.  One .cc file each says how it works.
#pragma once

#include <cstddef>
#include <vector>

#include "base/dtype.h"
#include "collective/communicator.h"

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

// `data` of `root` is copied over everybody's.
struct Broadcast {
  void* data;
  size_t count;
  DType dtype;
  int root;
};
void broadcast(Communicator&, const Broadcast&);

// outputs[r] receives rank r's input: `count` elements each.  An output may be the input itself.
struct AllGather {
  const void* input;
  std::vector<void*> outputs;
  size_t count;
  DType dtype;
};
void allGather(Communicator&, const AllGather&);

// Returns when all ranks have called it.
struct Barrier {};
void barrier(Communicator&, const Barrier&);

}  // namespace ringreduce
