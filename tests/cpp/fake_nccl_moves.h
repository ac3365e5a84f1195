// The moving half of the stand-in for NCCL: communicators whose ranks are threads of one process,
// and sends and receives that really move bytes between them.
//
// It is stricter than NCCL: nothing is buffered, so a group of calls is over only once every peer
// has come with a group that has its counterpart, in this order.  What would hang NCCL or read
// wrong memory there (counterparts of different sizes, a circle of waits) is an entry in
// `complaint`.
#pragma once

#include <cstddef>

struct ncclComm;

namespace fake_nccl_moves {

void makeId(char (&id)[128]);
int join(ncclComm** comm, int size, const char (&id)[128], int rank);
int leave(ncclComm* comm, bool aborting);
int asyncError(ncclComm* comm, int* error);
int groupStart();
int groupEnd();
// `to` is null for a send.
int transfer(ncclComm* comm, const void* from, void* to, size_t bytes, int peer, void* stream);

}  // namespace fake_nccl_moves
