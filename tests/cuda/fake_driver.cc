// The driver's half of the fake.
#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "cuda/cuda_errors.h"
#include "fake_world.h"

namespace fake {
namespace {

constexpr size_t kGranularity = 2 << 20;
constexpr size_t kMulticastGranularity = 4 << 20;  // another, so that mistakes show

ino_t numberOf(int fd) {
  struct stat status{};
  fstat(fd, &status);
  return status.st_ino;
}

CUresult getErrorName(CUresult, const char** name) {
  *name = "CUDA_ERROR_FAKE";
  return CUDA_SUCCESS;
}
CUresult getErrorString(CUresult, const char** text) {
  *text = "of the fake";
  return CUDA_SUCCESS;
}
CUresult deviceGet(CUdevice* device, int ordinal) {
  if (const auto e = fate(kNoGpu)) return asDriver(e);
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult deviceGetUuid(CUuuid* uuid, CUdevice device) {
  if (const auto e = fate(kNoGpu)) return asDriver(e);
  std::memset(uuid, 0xab, sizeof *uuid);
  uuid->bytes[15] = static_cast<char>(gpuOf(device));
  return CUDA_SUCCESS;
}
CUresult deviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) {
  if (const auto e = fate(kNoGpu)) return asDriver(e);
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
      *value = machine().exports;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
      *value = machine().registers;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_MPS_ENABLED:
      *value = machine().mps;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED:
      *value = machine().multicasts;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT:
      *value = machine().ends_long_kernels;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED:
      *value = 0;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;  // as from a driver that is older than the attribute
  }
}
CUresult devicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  if (const auto e = fate(device)) return asDriver(e);
  *context = reinterpret_cast<CUcontext>(static_cast<uintptr_t>(device) + 1);
  return CUDA_SUCCESS;
}
CUresult ctxPushCurrent(CUcontext context) {
  contexts.push_back(static_cast<int>(reinterpret_cast<uintptr_t>(context)) - 1);
  return CUDA_SUCCESS;
}
CUresult ctxPopCurrent(CUcontext*) {
  if (contexts.empty()) undefined("popped a context that was not pushed");
  contexts.pop_back();
  return CUDA_SUCCESS;
}

CUresult memGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*,
                                     CUmemAllocationGranularity_flags) {
  if (const auto e = fate()) return asDriver(e);
  *bytes = kGranularity;
  return CUDA_SUCCESS;
}
CUresult memCreate(CUmemGenericAllocationHandle* handle, size_t bytes,
                   const CUmemAllocationProp* properties, unsigned long long) {
  if (const auto e = besideCaptures()) return asDriver(e);
  if (const auto e = fate()) return asDriver(e);
  if (bytes % kGranularity) return CUDA_ERROR_INVALID_VALUE;
  // As where no process may use the fabric between hosts.
  if (properties->requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC) return CUDA_ERROR_NOT_PERMITTED;
  World& w = world();
  const std::lock_guard lock(w.mutex);
  *handle = w.next_handle++;
  w.handles[*handle] = {newMemory(gpuOf(properties->location.id), bytes,
                                  static_cast<unsigned>(properties->requestedHandleTypes)),
                        1};
  return CUDA_SUCCESS;
}
CUresult memRelease(CUmemGenericAllocationHandle handle) {
  if (const auto e = fateOfReturn()) return asDriver(e);
  World& w = world();
  const std::lock_guard lock(w.mutex);
  if (!w.handles.contains(handle)) undefined("released a handle twice");
  Physical& physical = w.handles[handle];
  if (--physical.references > 0) return CUDA_SUCCESS;
  close(physical.fd);
  w.handles.erase(handle);
  return CUDA_SUCCESS;
}
CUresult memAddressReserve(CUdeviceptr* place, size_t bytes, size_t alignment, CUdeviceptr,
                           unsigned long long) {
  if (const auto e = fate()) return asDriver(e);
  // With room to both sides of an address that is aligned.
  const size_t unit = std::max(alignment, kGranularity);
  void* all =
      mmap(nullptr, bytes + unit, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  auto* begin = static_cast<char*>(all);
  char* at = begin + (unit - reinterpret_cast<uintptr_t>(all) % unit) % unit;
  if (at > begin) munmap(begin, static_cast<size_t>(at - begin));
  munmap(at + bytes, static_cast<size_t>(begin + unit - at));
  const std::lock_guard lock(world().mutex);
  world().reservations[at] = bytes;
  *place = reinterpret_cast<CUdeviceptr>(at);
  return CUDA_SUCCESS;
}
CUresult memAddressFree(CUdeviceptr place, size_t bytes) {
  if (const auto e = fateOfReturn()) return asDriver(e);
  World& w = world();
  const std::lock_guard lock(w.mutex);
  auto* at = reinterpret_cast<char*>(place);
  const auto found = w.reservations.find(at);
  if (found == w.reservations.end() || found->second != bytes)
    undefined("freed addresses that were not reserved so");
  for (const auto& [base, range] : w.ranges)
    if (base >= at && base < at + bytes) undefined("freed addresses that are mapped");
  munmap(at, bytes);
  w.reservations.erase(found);
  return CUDA_SUCCESS;
}
CUresult memMap(CUdeviceptr place, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                unsigned long long) {
  if (const auto e = besideCaptures()) return asDriver(e);
  if (const auto e = fate()) return asDriver(e);
  World& w = world();
  const std::lock_guard lock(w.mutex);
  const auto found = w.handles.find(handle);
  if (found == w.handles.end() || offset != 0 || bytes > bytesIn(found->second.fd))
    return CUDA_ERROR_INVALID_VALUE;
  auto* at = reinterpret_cast<char*>(place);
  if (w.find(at)) return CUDA_ERROR_ALREADY_MAPPED;
  const int fd = dup(found->second.fd);
  const int gpu = withTail(fd, [](Tail& tail) { return tail.gpu; });
  const bool is_multicast = withTail(fd, [](Tail& tail) {
    if (tail.team.wanted > 0 && tail.team.added < tail.team.wanted)
      undefined("would wait for GPUs that were not added to a multicast object");
    return tail.team.wanted > 0;
  });
  if (is_multicast && (place | bytes) % kMulticastGranularity) {
    close(fd);
    return CUDA_ERROR_INVALID_VALUE;
  }
  show(fd, bytes, gpuOf(currentOrdinal()), at);
  w.ranges[at] = {Range::Kind::kVirtual, bytes, gpu, fd};
  w.ranges[at].is_multicast = is_multicast;
  return CUDA_SUCCESS;
}
CUresult memSetAccess(CUdeviceptr place, size_t bytes, const CUmemAccessDesc* access, size_t n) {
  if (const auto e = besideCaptures()) return asDriver(e);
  if (const auto e = fate()) return asDriver(e);
  World& w = world();
  const std::lock_guard lock(w.mutex);
  auto* at = reinterpret_cast<char*>(place);
  for (auto& [base, range] : w.ranges) {
    if (base < at || base >= at + bytes) continue;
    for (size_t i = 0; i < n; ++i) {
      if (range.is_multicast) {
        range.access.insert(access[i].location.id);
        continue;
      }
      if (!reaches(gpuOf(access[i].location.id), range.gpu)) return CUDA_ERROR_INVALID_DEVICE;
      if (machine().bar1_is_full && gpuOf(access[i].location.id) != range.gpu) {
        ++w.maps_refused;
        return CUDA_ERROR_OUT_OF_MEMORY;
      }
      range.access.insert(access[i].location.id);
    }
    w.reveal(base, range);
  }
  return CUDA_SUCCESS;
}
CUresult memUnmap(CUdeviceptr place, size_t bytes) {
  if (const auto e = besideCaptures()) return asDriver(e);
  if (const auto e = fateOfReturn()) return asDriver(e);
  World& w = world();
  auto* at = reinterpret_cast<char*>(place);
  finishWorkOn(at, bytes);
  const std::lock_guard lock(w.mutex);
  w.noteUnmapper();
  size_t gone = 0;
  for (auto it = w.ranges.begin(); it != w.ranges.end();) {
    if (it->first < at || it->first >= at + bytes) {
      ++it;
      continue;
    }
    gone += it->second.bytes;
    for (char* target : it->second.targets) munmap(target, it->second.bytes);
    close(it->second.fd);
    it = w.ranges.erase(it);
  }
  if (gone != bytes) undefined("unmapped what was not mapped so");
  mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return CUDA_SUCCESS;
}
CUresult memExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle,
                                    CUmemAllocationHandleType type, unsigned long long) {
  if (const auto e = fate()) return asDriver(e);
  const std::lock_guard lock(world().mutex);
  const int fd = world().handles.at(handle).fd;
  if (!(withTail(fd, [](Tail& tail) { return tail.exportable; }) & type))
    return CUDA_ERROR_INVALID_VALUE;
  *static_cast<int*>(out) = dup(fd);
  return CUDA_SUCCESS;
}
CUresult memImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* descriptor,
                                      CUmemAllocationHandleType) {
  if (const auto e = fate()) return asDriver(e);
  World& w = world();
  const std::lock_guard lock(w.mutex);
  const int fd = dup(static_cast<int>(reinterpret_cast<uintptr_t>(descriptor)));
  if (fd < 0) return CUDA_ERROR_INVALID_VALUE;
  *handle = w.next_handle++;
  w.handles[*handle] = {fd, 1};
  return CUDA_SUCCESS;
}

CUresult memRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* pointer) {
  if (const auto e = fate()) return asDriver(e);
  World& w = world();
  const std::lock_guard lock(w.mutex);
  const Range* range = w.find(pointer);
  if (!range || range->kind != Range::Kind::kVirtual) return CUDA_ERROR_INVALID_VALUE;
  for (auto& [known, physical] : w.handles)
    if (numberOf(physical.fd) == numberOf(range->fd)) {  // the same as long as anybody has one
      ++physical.references;
      *handle = known;
      return CUDA_SUCCESS;
    }
  *handle = w.next_handle++;
  w.handles[*handle] = {dup(range->fd), 1};
  return CUDA_SUCCESS;
}

// ---- multicast objects

CUresult multicastGetGranularity(size_t* bytes, const CUmulticastObjectProp* properties,
                                 CUmulticastGranularity_flags) {
  if (const auto e = fate()) return asDriver(e);
  if (!machine().multicasts) return CUDA_ERROR_NOT_SUPPORTED;
  if (properties->numDevices == 0 || properties->size == 0) return CUDA_ERROR_INVALID_VALUE;
  *bytes = kMulticastGranularity;
  return CUDA_SUCCESS;
}
CUresult multicastCreate(CUmemGenericAllocationHandle* handle,
                         const CUmulticastObjectProp* properties) {
  if (const auto e = besideCaptures()) return asDriver(e);
  if (const auto e = fate()) return asDriver(e);
  if (!machine().multicasts) return CUDA_ERROR_NOT_SUPPORTED;
  if (properties->flags || properties->size % kMulticastGranularity ||
      properties->numDevices > kMostGpus)
    return CUDA_ERROR_INVALID_VALUE;
  World& w = world();
  const std::lock_guard lock(w.mutex);
  *handle = w.next_handle++;
  w.handles[*handle] = {
      newMulticast(properties->size, static_cast<unsigned>(properties->handleTypes),
                   properties->numDevices),
      1};
  return CUDA_SUCCESS;
}
// The member that is this GPU, or null.
Team::Member* memberOf(Team& team, int gpu) {
  for (auto& member : team.members)
    if (member.gpu == gpu + 1) return &member;
  return nullptr;
}
CUresult multicastAddDevice(CUmemGenericAllocationHandle handle, CUdevice device) {
  if (const auto e = fate()) return asDriver(e);
  const std::lock_guard lock(world().mutex);
  const auto found = world().handles.find(handle);
  if (found == world().handles.end()) return CUDA_ERROR_INVALID_VALUE;
  const int gpu = gpuOf(device);
  return withTail(found->second.fd, [&](Tail& tail) {
    Team& team = tail.team;
    if (team.wanted == 0 || memberOf(team, gpu)) return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < team.wanted; ++i)
      if (int nobody = 0; team.members[i].gpu.compare_exchange_strong(nobody, gpu + 1)) {
        ++team.added;
        return CUDA_SUCCESS;
      }
    return CUDA_ERROR_INVALID_VALUE;
  });
}
CUresult multicastBindMem(CUmemGenericAllocationHandle handle, size_t offset,
                          CUmemGenericAllocationHandle memory, size_t memory_offset, size_t bytes,
                          unsigned long long flags) {
  if (const auto e = besideCaptures()) return asDriver(e);
  if (const auto e = fate()) return asDriver(e);
  World& w = world();
  const std::lock_guard lock(w.mutex);
  const auto object = w.handles.find(handle), bound = w.handles.find(memory);
  if (object == w.handles.end() || bound == w.handles.end()) return CUDA_ERROR_INVALID_VALUE;
  const int object_fd = object->second.fd, fd = bound->second.fd;
  // The fake knows only whole objects.
  if (flags || offset || memory_offset || bytes % kMulticastGranularity ||
      bytes != bytesIn(object_fd) || bytes > bytesIn(fd))
    return CUDA_ERROR_INVALID_VALUE;
  return withTail(object_fd, [&](Tail& tail) {
    Team& team = tail.team;
    if (team.wanted == 0) return CUDA_ERROR_INVALID_VALUE;
    if (team.added < team.wanted)
      undefined("would wait for GPUs that were not added to a multicast object");
    const auto [gpu, exportable] = withTail(
        fd, [](Tail& of_memory) { return std::pair(of_memory.gpu, of_memory.exportable); });
    if (tail.exportable & ~exportable) return CUDA_ERROR_INVALID_VALUE;
    Team::Member* member = memberOf(team, gpu);
    if (!member) return CUDA_ERROR_INVALID_DEVICE;
    if (member->fd != 0) return CUDA_ERROR_INVALID_VALUE;
    const int kept = dup(fd);
    w.bound[{numberOf(object_fd), gpu}] = kept;
    member->pid = getpid();
    member->fd = kept + 1;
    ++team.bound;
    return CUDA_SUCCESS;
  });
}
CUresult multicastUnbind(CUmemGenericAllocationHandle handle, CUdevice device, size_t offset,
                         size_t bytes) {
  if (const auto e = fateOfReturn()) return asDriver(e);
  World& w = world();
  const std::lock_guard lock(w.mutex);
  const auto object = w.handles.find(handle);
  if (object == w.handles.end()) undefined("unbound memory from an object that was released");
  const int object_fd = object->second.fd, gpu = gpuOf(device);
  const auto found = w.bound.find({numberOf(object_fd), gpu});
  if (found == w.bound.end() || offset || bytes != bytesIn(object_fd))
    undefined("unbound memory that was not bound so");
  for (const auto& [base, range] : w.ranges)
    if (range.is_multicast && numberOf(range.fd) == numberOf(object_fd) &&
        range.access.contains(device))
      undefined("unbound memory from an object that its GPU still maps");
  withTail(object_fd, [&](Tail& tail) {
    Team::Member* member = memberOf(tail.team, gpu);
    member->fd = 0;
    --tail.team.bound;
    return 0;
  });
  close(found->second);
  w.bound.erase(found);
  return CUDA_SUCCESS;
}

}  // namespace

// Memory of a process that has ended stays as it was, once it has been seen.
extern "C" int fakeMulticast(const void* address, void** places) {
  World& w = world();
  const std::lock_guard lock(w.mutex);
  char* base = nullptr;
  Range* range = w.find(address, &base);
  if (!range || !range->is_multicast || range->access.empty())
    undefined("multimem at an address that is not multicast");
  if (range->targets.empty())
    withTail(range->fd, [&](Tail& tail) {
      Team& team = tail.team;
      for (unsigned i = 0; i < team.wanted; ++i) {
        const Team::Member& member = team.members[i];
        if (member.fd == 0) undefined("multimem before all GPUs have bound memory");
        const std::string path =
            "/proc/" + std::to_string(member.pid) + "/fd/" + std::to_string(member.fd - 1);
        const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
        void* at = fd < 0 ? MAP_FAILED
                          : mmap(nullptr, range->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (at == MAP_FAILED) undefined("multimem to memory of a process that has ended");
        close(fd);
        range->targets.push_back(static_cast<char*>(at));
      }
      return 0;
    });
  const auto offset = static_cast<const char*>(address) - base;
  for (size_t i = 0; i < range->targets.size(); ++i) places[i] = range->targets[i] + offset;
  return static_cast<int>(range->targets.size());
}

void* driverFunction(const std::string& wanted) {
#define FAKE_FUNCTION(member, function, version)                    \
  {                                                                 \
    const PFN_##function##_v##version found = member;               \
    if (wanted == #function) return reinterpret_cast<void*>(found); \
  }
  RINGREDUCE_DRIVER_FUNCTIONS(FAKE_FUNCTION)
  RINGREDUCE_MULTICAST_FUNCTIONS(FAKE_FUNCTION)
#undef FAKE_FUNCTION
  return anotherDriverFunction(wanted);
}

}  // namespace fake
