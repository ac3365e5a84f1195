// A stand-in for libnccl.so.2: it has the functions, notes how they are called, and does nothing,
// or, if asked to, moves bytes between threads (fake_nccl_moves.h).
// Written after NCCL's documentation and not after csrc/cuda/internode/nccl.cc, so that both must
// agree.
#include "fake_nccl.h"

#include <cstdint>

#include "fake_nccl_moves.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT FakeNccl fake_nccl;
FakeNccl fake_nccl;

namespace {

struct Id {
  char internal[128];
};

template <class T>
T at(const void* base, size_t offset) {
  T value;
  std::memcpy(&value, static_cast<const char*>(base) + offset, sizeof value);
  return value;
}

}  // namespace

// One that only notes; those that move are known to fake_nccl_moves.cc only.
struct NotingComm {
  int rank;
};

EXPORT int ncclGetVersion(int* version) {
  *version = fake_nccl.version;
  return fake_nccl.answer("ncclGetVersion");
}
EXPORT const char* ncclGetErrorString(int result) {
  return result == 6 ? "remote process exited or there was a network error" : "a failure";
}
EXPORT const char* ncclGetLastError(ncclComm*) {
  return fake_nccl.last_error;
}
EXPORT int ncclGetUniqueId(Id* id) {
  if (fake_nccl.moves) fake_nccl_moves::makeId(id->internal);
  for (int i = 0; i < 128 && !fake_nccl.moves; ++i) id->internal[i] = static_cast<char>(i);
  return fake_nccl.answer("ncclGetUniqueId");
}

// ncclConfig_t: size_t size; unsigned magic, version; int blocking, cgaClusterSize, minCTAs,
// maxCTAs
EXPORT int ncclCommInitRankConfig(ncclComm** comm, int nranks, Id id, int rank, void* config) {
  if (at<size_t>(config, 0) < 44 || at<unsigned>(config, 8) != 0xcafebeef) return 4;
  if (fake_nccl.moves) {
    if (const int result = fake_nccl.answer("ncclCommInitRankConfig")) return result;
    return fake_nccl_moves::join(comm, nranks, id.internal, rank);
  }
  fake_nccl.blocking = at<int>(config, 16);
  fake_nccl.max_blocks = at<int>(config, 28);
  std::memcpy(fake_nccl.id, id.internal, sizeof id);
  fake_nccl.rank = rank;
  fake_nccl.size = nranks;
  if (const int result = fake_nccl.answer("ncclCommInitRankConfig")) return result;
  *comm = reinterpret_cast<ncclComm*>(new NotingComm{rank});
  ++fake_nccl.made;
  return 0;
}
EXPORT int ncclCommDestroy(ncclComm* comm) {
  if (fake_nccl.moves) return fake_nccl_moves::leave(comm, false);
  delete reinterpret_cast<NotingComm*>(comm);
  ++fake_nccl.destroyed;
  return fake_nccl.answer("ncclCommDestroy");
}
EXPORT int ncclCommAbort(ncclComm* comm) {
  if (fake_nccl.moves) return fake_nccl_moves::leave(comm, true);
  delete reinterpret_cast<NotingComm*>(comm);
  ++fake_nccl.aborted;
  return fake_nccl.answer("ncclCommAbort");
}
EXPORT int ncclCommGetAsyncError(ncclComm* comm, int* error) {
  if (fake_nccl.moves) return fake_nccl_moves::asyncError(comm, error);
  *error = fake_nccl.asynchronous_error;
  return fake_nccl.answer("ncclCommGetAsyncError");
}

EXPORT int ncclAllReduce(const void*, void*, size_t count, int dtype, int op, ncclComm* comm,
                         void*) {
  fake_nccl.rank = reinterpret_cast<NotingComm*>(comm)->rank;
  fake_nccl.count = count;
  fake_nccl.dtype = dtype;
  fake_nccl.op = op;
  return fake_nccl.answer("ncclAllReduce");
}
EXPORT int ncclSend(const void* data, size_t count, int dtype, int peer, ncclComm* comm,
                    void* stream) {
  if (fake_nccl.moves) {
    if (const int result = fake_nccl.answer("ncclSend")) return result;
    return fake_nccl_moves::transfer(comm, data, nullptr, count, peer, stream);
  }
  fake_nccl.count = count;
  fake_nccl.dtype = dtype;
  fake_nccl.peer = peer;
  return fake_nccl.answer("ncclSend");
}
EXPORT int ncclRecv(void* data, size_t count, int dtype, int peer, ncclComm* comm, void* stream) {
  if (fake_nccl.moves) {
    if (const int result = fake_nccl.answer("ncclRecv")) return result;
    return fake_nccl_moves::transfer(comm, nullptr, data, count, peer, stream);
  }
  fake_nccl.count = count;
  fake_nccl.dtype = dtype;
  fake_nccl.peer = peer;
  return fake_nccl.answer("ncclRecv");
}

EXPORT int ncclGroupStart() {
  if (fake_nccl.moves) return fake_nccl_moves::groupStart();
  ++fake_nccl.depth;
  return fake_nccl.answer("ncclGroupStart");
}
EXPORT int ncclGroupEnd() {
  if (fake_nccl.moves) return fake_nccl_moves::groupEnd();
  --fake_nccl.depth;
  ++fake_nccl.groups;
  return fake_nccl.answer("ncclGroupEnd");
}

EXPORT int ncclRedOpCreatePreMulSum(int* op, void* scalar, int dtype, int residence, ncclComm*) {
  constexpr int kHostImmediate = 1;
  if (residence != kHostImmediate) return 4;
  const size_t size = dtype == 8 ? 8 : dtype == 7 ? 4 : 2;
  std::memset(fake_nccl.scalar, 0, sizeof fake_nccl.scalar);
  std::memcpy(fake_nccl.scalar, scalar, size);
  *op = 5 + fake_nccl.operators++;
  return fake_nccl.answer("ncclRedOpCreatePreMulSum");
}
EXPORT int ncclRedOpDestroy(int, ncclComm*) {
  --fake_nccl.operators;
  return fake_nccl.answer("ncclRedOpDestroy");
}
