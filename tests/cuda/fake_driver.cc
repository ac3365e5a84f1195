// The driver's half of the fake.
#include <cuda.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "cuda/cuda_errors.h"
#include "fake_world.h"

namespace fake {
namespace {

constexpr size_t kGranularity = 2 << 20;

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
CUresult memAddressReserve(CUdeviceptr* place, size_t bytes, size_t, CUdeviceptr,
                           unsigned long long) {
  if (const auto e = fate()) return asDriver(e);
  void* at = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const std::lock_guard lock(world().mutex);
  world().reservations[static_cast<char*>(at)] = bytes;
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
  show(fd, bytes, gpuOf(currentOrdinal()), at);
  w.ranges[at] = {Range::Kind::kVirtual, bytes, gpu, fd};
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
      if (!reaches(gpuOf(access[i].location.id), range.gpu)) return CUDA_ERROR_INVALID_DEVICE;
      if (machine().bar1_is_full && gpuOf(access[i].location.id) != range.gpu)
        return CUDA_ERROR_OUT_OF_MEMORY;
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

}  // namespace

void* driverFunction(const std::string& wanted) {
#define FAKE_FUNCTION(member, function, version)                    \
  {                                                                 \
    const PFN_##function##_v##version found = member;               \
    if (wanted == #function) return reinterpret_cast<void*>(found); \
  }
  RINGREDUCE_DRIVER_FUNCTIONS(FAKE_FUNCTION)
#undef FAKE_FUNCTION
  return anotherDriverFunction(wanted);
}

}  // namespace fake
