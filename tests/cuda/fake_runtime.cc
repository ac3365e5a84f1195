// The runtime's half of the fake.
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <utility>
#include <vector>

#include "fake_world.h"

using namespace fake;

namespace {

constexpr size_t kMemory = size_t{1} << 40;
constexpr uintptr_t kPage = 4096;

thread_local cudaError_t last_error = cudaSuccess;
thread_local std::string last_words;

// A handle of legacy IPC; any process of the same user finds the memory with it.
struct OperationHandle {
  pid_t pid;
  int fd;
  char* base;
};
static_assert(sizeof(OperationHandle) <= sizeof(cudaIpcMemHandle_t));

bool replaceOpener(Tail& tail, pid_t from, pid_t to) {
  for (auto& opener : tail.openers)
    if (pid_t expected = from; opener.compare_exchange_strong(expected, to)) return true;
  undefined("more processes than the fake has room for");
}

}  // namespace

cudaError_t fake::said(cudaError_t error, const std::string& words) {
  if (error == cudaSuccess) return error;
  last_error = error;
  last_words = words;
  return error;
}

extern "C" {

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorIllegalAddress:
      return "cudaErrorIllegalAddress";
    case cudaErrorLaunchFailure:
      return "cudaErrorLaunchFailure";
    case cudaErrorNotSupported:
      return "cudaErrorNotSupported";
    case cudaErrorInsufficientDriver:
      return "cudaErrorInsufficientDriver";
    default:
      return "cudaErrorOfTheFake";
  }
}
const char* cudaGetErrorString(cudaError_t error) {
  if (!last_words.empty()) return last_words.c_str();
  return error == cudaErrorIllegalAddress ? "an illegal memory access was encountered"
                                          : "as the fake says";
}
cudaError_t cudaGetLastError() {
  const cudaError_t last = cudaPeekAtLastError();
  last_error = cudaSuccess;
  return last;
}
cudaError_t cudaPeekAtLastError() {
  const auto ruined = ruinOf(currentOrdinal());
  return ruined ? ruined : last_error;
}

// The names of the threads that have unmapped or closed memory since the call before: "python".
const char* fakeUnmappers() {
  static thread_local std::string text;
  const std::lock_guard lock(world().mutex);
  text.clear();
  for (const std::string& name : std::exchange(world().unmappers, {}))
    text += (text.empty() ? "" : " ") + name;
  return text.c_str();
}

// ---- devices

cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* n) {
  if (const auto e = fate(kNoGpu)) return said(e);
  *n = count();
  return *n > 0 ? cudaSuccess : said(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* ordinal) {
  *ordinal = currentOrdinal();
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  if (const auto e = fate(kNoGpu)) return said(e);
  *properties = {};
  std::strcpy(properties->name, "Fake");
  properties->major = 9;
  properties->multiProcessorCount = machine().multiprocessors;
  properties->totalGlobalMem = kMemory;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int ordinal, int peer) {
  if (const auto e = fate()) return said(e);
  *can = reaches(gpuOf(ordinal), gpuOf(peer));
  return cudaSuccess;
}
// Peers have NVLink, which has atomic operations.
cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr which, int ordinal, int peer) {
  if (const auto e = fate()) return said(e);
  if (which != cudaDevP2PAttrNativeAtomicSupported) return said(cudaErrorInvalidValue);
  *value = reaches(gpuOf(ordinal), gpuOf(peer));
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  if (const auto e = besideCaptures()) return said(e);
  if (const auto e = fate()) return said(e);
  if (!reaches(gpuOf(currentOrdinal()), gpuOf(peer))) return said(cudaErrorPeerAccessUnsupported);
  if (machine().bar1_is_full) return said(cudaErrorMemoryAllocation);
  const std::lock_guard lock(world().mutex);
  if (world().peers.emplace(currentOrdinal(), peer).second) return cudaSuccess;
  return said(cudaErrorPeerAccessAlreadyEnabled);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* answer) {
  if (!machine().has_driver) return said(cudaErrorInsufficientDriver);
  *function = driverFunction(name);
  *answer = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

#if CUDART_VERSION < 12050
cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* answer) {
  return cudaGetDriverEntryPointByVersion(name, function, 0, flags, answer);
}
#endif

// ---- plain memory and legacy IPC

// Of all GPUs together, and of this process only.
cudaError_t cudaMemGetInfo(size_t* left, size_t* all) {
  if (const auto e = fate()) return said(e);
  const std::lock_guard lock(world().mutex);
  *all = kMemory;
  *left = *all;
  for (const auto& [base, range] : world().ranges) *left -= range.bytes;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** data, size_t bytes) {
  if (const auto e = besideCaptures()) return said(e);
  if (const auto e = fate()) return said(e);
  bytes = (bytes + 4095) / 4096 * 4096;  // whole pages
  const int ordinal = currentOrdinal(), gpu = gpuOf(ordinal);
  const int fd = newMemory(gpu, bytes, 0);
  char* at = show(fd, bytes, gpu);
  const std::lock_guard lock(world().mutex);
  const Range& range = world().ranges[at] = {Range::Kind::kPlain, bytes, gpu, fd, {ordinal}};
  world().reveal(at, range);
  *data = at;
  return cudaSuccess;
}
cudaError_t cudaFree(void* data) {
  if (const auto e = besideCaptures()) return said(e);
  if (const auto e = fateOfReturn()) return said(e);
  if (!data) return cudaSuccess;
  finishWorkOn(data, 1);
  const std::lock_guard lock(world().mutex);
  const auto found = world().ranges.find(static_cast<char*>(data));
  if (found == world().ranges.end() || found->second.kind != Range::Kind::kPlain)
    return said(cudaErrorInvalidValue);
  const Range& range = found->second;
  if (withTail(range.fd, isOpen)) undefined("freed memory that another process has open");
  munmap(data, range.bytes);
  close(range.fd);
  world().ranges.erase(found);
  return cudaSuccess;
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* data) {
  if (const auto e = besideCaptures()) return said(e);
  if (const auto e = fate()) return said(e);
  if (!machine().ipc) return said(cudaErrorNotSupported);
  const std::lock_guard lock(world().mutex);
  char* base = nullptr;
  const Range* range = world().find(data, &base);
  if (!range || range->kind != Range::Kind::kPlain) return said(cudaErrorInvalidValue);
  const OperationHandle ticket{getpid(), range->fd, base};
  std::memcpy(handle, &ticket, sizeof ticket);
  return cudaSuccess;
}
static bool areSame(int fd, int other) {
  struct stat a{}, b{};
  return fstat(fd, &a) == 0 && fstat(other, &b) == 0 && a.st_dev == b.st_dev &&
         a.st_ino == b.st_ino;
}
cudaError_t cudaIpcOpenMemHandle(void** data, cudaIpcMemHandle_t handle, unsigned) {
  if (const auto e = besideCaptures()) return said(e);
  if (const auto e = fate()) return said(e);
  OperationHandle ticket{};
  std::memcpy(&ticket, &handle, sizeof ticket);
  if (ticket.pid == getpid()) return said(cudaErrorDeviceUninitialized);
  const std::string path =
      "/proc/" + std::to_string(ticket.pid) + "/fd/" + std::to_string(ticket.fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return said(cudaErrorInvalidResourceHandle);
  const int gpu = withTail(fd, [](Tail& tail) { return tail.gpu; });
  if (!reaches(gpuOf(currentOrdinal()), gpu)) {
    close(fd);
    return said(cudaErrorPeerAccessUnsupported);
  }
  if (machine().bar1_is_full && gpuOf(currentOrdinal()) != gpu) {
    close(fd);
    return said(cudaErrorMemoryAllocation);
  }
  {
    // Opened again it is the same mapping, which counts.
    const std::lock_guard lock(world().mutex);
    for (auto& [at, range] : world().ranges)
      if (range.kind == Range::Kind::kOpened && areSame(range.fd, fd) &&
          range.access.count(currentOrdinal())) {
        ++range.times;
        close(fd);
        *data = at;
        return cudaSuccess;
      }
  }
  withTail(fd, [](Tail& tail) { return replaceOpener(tail, 0, getpid()); });
  const size_t bytes = bytesIn(fd);
  char* at = show(fd, bytes, gpuOf(currentOrdinal()));
  {
    const std::lock_guard lock(world().mutex);
    Range& range = world().ranges[at] = {Range::Kind::kOpened, bytes, gpu, fd, {currentOrdinal()}};
    range.exporter = ticket.pid;
    world().reveal(at, range);
  }
  world().endWith(ticket.pid);
  *data = at;
  return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void* data) {
  if (const auto e = besideCaptures()) return said(e);
  if (const auto e = fateOfReturn()) return said(e);
  finishWorkOn(data, 1);
  const std::lock_guard lock(world().mutex);
  const auto found = world().ranges.find(static_cast<char*>(data));
  if (found == world().ranges.end() || found->second.kind != Range::Kind::kOpened)
    undefined("closed an IPC handle that is not open");
  world().noteUnmapper();
  if (--found->second.times > 0) return cudaSuccess;
  withTail(found->second.fd, [](Tail& tail) { return replaceOpener(tail, getpid(), 0); });
  munmap(data, found->second.bytes);
  close(found->second.fd);
  world().ranges.erase(found);
  return cudaSuccess;
}

// ---- host memory

cudaError_t cudaHostRegister(void* data, size_t bytes, unsigned) {
  if (const auto e = besideCaptures()) return said(e);
  if (const auto e = fate()) return said(e);
  if (!machine().registers) return said(cudaErrorNotSupported);
  if (!data || bytes == 0) return said(cudaErrorInvalidValue);
  // Whole pages are pinned, so ranges may not share one.
  const auto begin = reinterpret_cast<uintptr_t>(data) / kPage * kPage;
  const auto end = (reinterpret_cast<uintptr_t>(data) + bytes + kPage - 1) / kPage * kPage;
  const std::lock_guard lock(world().mutex);
  for (const auto& [base, size] : world().registered) {
    const auto other = reinterpret_cast<uintptr_t>(base);
    if (other / kPage * kPage < end && begin < other + size)
      return said(cudaErrorHostMemoryAlreadyRegistered);
  }
  std::vector<unsigned char> there((end - begin) / kPage);
  if (mincore(reinterpret_cast<void*>(begin), end - begin, there.data()) != 0)
    return said(cudaErrorInvalidValue);  // it is not mapped
  world().registered[static_cast<char*>(data)] = bytes;
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* data) {
  if (const auto e = besideCaptures()) return said(e);
  if (const auto e = fateOfReturn()) return said(e);
  const std::lock_guard lock(world().mutex);
  if (world().registered.erase(static_cast<char*>(data)) == 0)
    undefined("unregistered what was not registered");
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  if (const auto e = fate()) return said(e);
  const std::lock_guard lock(world().mutex);
  if (!world().registered.contains(static_cast<char*>(host))) return said(cudaErrorInvalidValue);
  *device = host;
  return cudaSuccess;
}

}  // extern "C"
