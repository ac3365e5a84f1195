// What a collective works with: its rank, its wires, and the options that all ranks share.
//
// Collectives are free functions over a Communicator and an arguments struct, one file each.  They
// run in one thread at a time, move bytes, and throw what a wait throws; what they wrote into user
// memory until then is undefined.  Arguments were checked before (group/operation.cc).
#pragma once

#include "algorithm/choose.h"
#include "transport/shm/exchange.h"
#include "transport/shm/shm_link.h"

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
