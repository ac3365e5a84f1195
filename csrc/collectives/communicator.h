// The shared memory that a collective runs over: its rank, its wires, and options of all ranks.
//
// Collectives are free functions over a Communicator and an arguments struct.  They run in one
// thread at a time.  They throw the error of a wait; user memory that they wrote is then undefined.
// Arguments were checked before (group/operation.cc).
#pragma once

#include "algorithm/choose.h"
#include "transport/link.h"
#include "transport/shm/exchange.h"

namespace ringreduce {

struct Communicator {
  int rank, size;
  Exchange& exchange;
  SendLink& next;  // to rank + 1
  RecvLink& prev;  // from rank - 1
  Slots link_slots;
  WaitGuard& watch;
  Algorithm algorithm;

  int previousRank() const { return (rank + size - 1) % size; }
};

}  // namespace ringreduce
