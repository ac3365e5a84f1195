// NCCL's functions, as far as PyTorch and the extension call them.  There is no header of NCCL's
// here: results, dtypes and ops are C enums, which are ints.
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "nccl_comm.h"

using namespace fake::nccl;

namespace {

struct UniqueId {
  char text[128];
};
// How a config begins, in all versions.
struct Config {
  size_t size;
  unsigned magic, version;
};
constexpr unsigned kMagic = 0xcafebeef;
constexpr int kNoColor = -1, kScalarOnDevice = 0;

template <class F>
int answer(const char* call, F&& f) {
  try {
    f();
    return kSuccess;
  } catch (const Failed& failed) {
    warn(std::string(call) + ": " + failed.why);
    groupFailed(failed.result);
    return failed.result;
  }
}

void must(bool right, const char* why) {
  if (!right) throw Failed{kInvalidArgument, why};
}

ncclComm* newComm() {
  int device;
  if (cudaGetDevice(&device) != cudaSuccess) throw Failed{kCudaError, "there is no GPU"};
  return new ncclComm{.rank = 0, .size = 0, .device = device, .name = {}};
}

// The ranks of the same colour, in order of their keys.
Seat split(ncclComm& comm, int color, int key) {
  struct Choice {
    int key, rank, color;
  };
  Heading heading{};
  heading.kind = Kind::kSplit;
  heading.bytes = sizeof(Choice);
  const Choice own{key, comm.rank, color};
  for (int to = 0; to < comm.size; ++to) comm.wire->send(to, heading, &own);
  std::vector<std::pair<int, int>> mine;  // keys and ranks
  for (int from = 0; from < comm.size; ++from) {
    const auto letter = comm.wire->receive(from, Kind::kSplit);
    if (!letter) throw Failed{kRemoteError, "a rank is gone"};
    Choice choice;
    std::memcpy(&choice, letter->data.data(), sizeof choice);
    if (choice.color == color) mine.emplace_back(choice.key, choice.rank);
  }
  std::ranges::sort(mine);
  const auto at = std::ranges::find(mine, std::pair(key, comm.rank));
  return {comm.name + "/" + std::to_string(++comm.splits) + "." + std::to_string(color),
          static_cast<int>(at - mine.begin()), static_cast<int>(mine.size())};
}

template <class... Rest>
int call(const char* name, ncclComm* comm, cudaStream_t stream, Rest... rest) {
  return answer(name, [&] { enqueue(comm, name, Call{rest...}, stream); });
}

}  // namespace

extern "C" {

int ncclGetVersion(int* number) {
  *number = version();
  return kSuccess;
}
const char* ncclGetErrorString(int result) {
  switch (result) {
    case kSuccess:
      return "no error";
    case kCudaError:
      return "an error of CUDA's";
    case kSystemError:
      return "an error of the system's";
    case kInternalError:
      return "an error inside of NCCL";
    case kInvalidArgument:
      return "an argument that is not valid";
    case kInvalidUsage:
      return "a usage that is not valid";
    case kRemoteError:
      return "another rank has ended, or cannot be reached";
    default:
      return "a result that the fake does not know";
  }
}
const char* ncclGetLastError(ncclComm*) {
  thread_local std::string words;
  words = lastWarning();
  return words.c_str();
}

// ---- communicators

int ncclGetUniqueId(UniqueId* id) {
  std::random_device random;
  *id = {};
  const std::string name = "fake-nccl-" + std::to_string(getpid()) + "-" +
                           std::to_string(random()) + "-" + std::to_string(random());
  std::ranges::copy(name, id->text);
  return kSuccess;
}
int ncclCommInitRankConfig(ncclComm** comm, int size, UniqueId id, int rank, const Config* config) {
  return answer("ncclCommInitRankConfig", [&] {
    must(comm && rank >= 0 && rank < size, "no such rank");
    must(!config || (config->magic == kMagic && config->size >= sizeof *config),
         "a config that was not initialized");
    must(std::memchr(id.text, 0, sizeof id.text), "an id that is not from ncclGetUniqueId");
    joinSoon(*comm = newComm(), [=] { return Seat{id.text, rank, size}; });
  });
}
int ncclCommInitRank(ncclComm** comm, int size, UniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, size, id, rank, nullptr);
}
int ncclCommInitAll(ncclComm** comms, int size, const int* devices) {
  UniqueId id;
  ncclGetUniqueId(&id);
  int before;
  if (cudaGetDevice(&before) != cudaSuccess) return kCudaError;
  beginGroup();
  for (int rank = 0; rank < size; ++rank) {
    cudaSetDevice(devices ? devices[rank] : rank);
    ncclCommInitRank(&comms[rank], size, id, rank);
  }
  cudaSetDevice(before);
  return endGroup();
}
int ncclCommSplit(ncclComm* parent, int color, int key, ncclComm** comm, const Config*) {
  return answer("ncclCommSplit", [&] {
    ncclComm& from = usable(parent, "ncclCommSplit");
    *comm = nullptr;
    if (color == kNoColor) {
      split(from, color, key);
      return;
    }
    joinSoon(*comm = newComm(), [&from, color, key] { return split(from, color, key); });
  });
}
int ncclCommFinalize(ncclComm* comm) {
  return answer("ncclCommFinalize", [&] {
    usable(comm, "ncclCommFinalize");
    std::unique_lock lock(comm->mutex);
    comm->changed.wait(lock, [&] { return comm->pending == 0; });
    comm->state = ncclComm::State::kFinalized;
  });
}
int ncclCommDestroy(ncclComm* comm) {
  return answer("ncclCommDestroy", [&] { leave(comm, false); });
}
int ncclCommAbort(ncclComm* comm) {
  return answer("ncclCommAbort", [&] { leave(comm, true); });
}
int ncclCommGetAsyncError(ncclComm* comm, int* error) {
  return answer("ncclCommGetAsyncError",
                [&] { *error = usable(comm, "ncclCommGetAsyncError", true).wire->error(); });
}
int ncclCommCount(ncclComm* comm, int* size) {
  return answer("ncclCommCount", [&] { *size = usable(comm, "ncclCommCount", true).size; });
}
int ncclCommUserRank(ncclComm* comm, int* rank) {
  return answer("ncclCommUserRank", [&] { *rank = usable(comm, "ncclCommUserRank").rank; });
}
int ncclCommCuDevice(ncclComm* comm, int* device) {
  return answer("ncclCommCuDevice", [&] { *device = usable(comm, "ncclCommCuDevice").device; });
}

// ---- groups

int ncclGroupStart() {
  beginGroup();
  return kSuccess;
}
int ncclGroupEnd() {
  return endGroup();
}

// ---- calls

int ncclAllReduce(const void* input, void* output, size_t count, int dtype, int op, ncclComm* comm,
                  cudaStream_t stream) {
  return call("ncclAllReduce", comm, stream, What::kAllReduce, input, output, count, dtype, op);
}
int ncclReduce(const void* input, void* output, size_t count, int dtype, int op, int root,
               ncclComm* comm, cudaStream_t stream) {
  return call("ncclReduce", comm, stream, What::kReduce, input, output, count, dtype, op, root);
}
int ncclBroadcast(const void* input, void* output, size_t count, int dtype, int root,
                  ncclComm* comm, cudaStream_t stream) {
  return call("ncclBroadcast", comm, stream, What::kBroadcast, input, output, count, dtype, kSum,
              root);
}
int ncclBcast(void* data, size_t count, int dtype, int root, ncclComm* comm, cudaStream_t stream) {
  return ncclBroadcast(data, data, count, dtype, root, comm, stream);
}
int ncclAllGather(const void* input, void* output, size_t count, int dtype, ncclComm* comm,
                  cudaStream_t stream) {
  return call("ncclAllGather", comm, stream, What::kAllGather, input, output, count, dtype);
}
int ncclReduceScatter(const void* input, void* output, size_t count, int dtype, int op,
                      ncclComm* comm, cudaStream_t stream) {
  return call("ncclReduceScatter", comm, stream, What::kReduceScatter, input, output, count, dtype,
              op);
}
int ncclAlltoAll(const void* input, void* output, size_t count, int dtype, ncclComm* comm,
                 cudaStream_t stream) {
  return call("ncclAlltoAll", comm, stream, What::kAllToAll, input, output, count, dtype);
}
int ncclSend(const void* data, size_t count, int dtype, int peer, ncclComm* comm,
             cudaStream_t stream) {
  return call("ncclSend", comm, stream, What::kSend, data, static_cast<void*>(nullptr), count,
              dtype, kSum, peer);
}
int ncclRecv(void* data, size_t count, int dtype, int peer, ncclComm* comm, cudaStream_t stream) {
  return call("ncclRecv", comm, stream, What::kRecv, static_cast<const void*>(nullptr), data, count,
              dtype, kSum, peer);
}

int ncclRedOpCreatePreMulSum(int* op, void* scalar, int dtype, int residence, ncclComm* comm) {
  return answer("ncclRedOpCreatePreMulSum", [&] {
    must(op && scalar && canReduce(dtype), "no op of this kind");
    usable(comm, "ncclRedOpCreatePreMulSum");
    const std::lock_guard lock(comm->mutex);
    *op = comm->next_op++;
    comm->ops[*op] = {dtype, residence == kScalarOnDevice
                                 ? Factor{0, scalar}
                                 : Factor{valueOf(scalar, dtype), nullptr}};
  });
}
int ncclRedOpDestroy(int op, ncclComm* comm) {
  return answer("ncclRedOpDestroy", [&] {
    usable(comm, "ncclRedOpDestroy");
    const std::lock_guard lock(comm->mutex);
    must(comm->ops.erase(op) == 1, "no op that ncclRedOpCreatePreMulSum has made");
  });
}

// ---- memory

int ncclMemAlloc(void** data, size_t bytes) {
  return cudaMalloc(data, bytes) == cudaSuccess ? kSuccess : kCudaError;
}
int ncclMemFree(void* data) {
  return cudaFree(data) == cudaSuccess ? kSuccess : kCudaError;
}
// It gains nothing here.
int ncclCommRegister(ncclComm* comm, void* data, size_t, void** handle) {
  return answer("ncclCommRegister", [&] {
    usable(comm, "ncclCommRegister");
    *handle = data;
  });
}
int ncclCommDeregister(ncclComm* comm, void*) {
  return answer("ncclCommDeregister", [&] { usable(comm, "ncclCommDeregister"); });
}

}  // extern "C"
