// PyTorch's questions about GPUs, to the runtime and to the driver.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>
#include <cstdio>

#include "../fake_world.h"
#include "streams.h"

using namespace fake;

namespace {

std::atomic<bool> used[kMostGpus];  // by ordinal: has a context

}  // namespace

extern "C" {

cudaError_t cudaSetDevice(int ordinal) {
  if (ordinal < 0 || ordinal >= count()) return said(cudaErrorInvalidDevice);
  if (contexts.empty()) contexts.push_back(ordinal);
  contexts.back() = ordinal;
  used[ordinal] = true;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = machine().multiprocessors;
      break;
    case cudaDevAttrWarpSize:
      *value = 32;
      break;
    case cudaDevAttrUnifiedAddressing:
      *value = 1;
      break;
    default:
      *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int ordinal) {
  std::snprintf(text, static_cast<size_t>(size), "0000:%02x:00.0", gpuOf(ordinal) + 1);
  return cudaSuccess;
}
cudaError_t cudaProfilerStart() {
  return cudaSuccess;
}
cudaError_t cudaProfilerStop() {
  return cudaSuccess;
}

// ---- the driver, which PyTorch links to as well, or asks the runtime for

CUresult cuInit(unsigned) {
  return count() > 0 ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}
// Both versions, since there are no parts of GPUs here.
CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice device) {
  return reinterpret_cast<decltype(&cuDeviceGetUuid_v2)>(driverFunction("cuDeviceGetUuid"))(uuid,
                                                                                            device);
}
#undef cuDeviceGetUuid
CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  return cuDeviceGetUuid_v2(uuid, device);
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  *flags = 0;
  *active = used[device];
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  *context =
      contexts.empty() ? nullptr : reinterpret_cast<CUcontext>(uintptr_t(contexts.back()) + 1);
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "as the fake says";
  return CUDA_SUCCESS;
}
CUresult cuMemsetD32Async(CUdeviceptr data, unsigned value, size_t words, CUstream stream) {
  auto* begin = reinterpret_cast<unsigned*>(data);
  return asDriver(putWork(streamOf(stream), [=] { std::fill_n(begin, words, value); }));
}

// Only for memory of other processes, which the tests do not let torch itself take.
CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp*,
                                                CUmemGenericAllocationHandle) {
  return CUDA_ERROR_NOT_SUPPORTED;
}

}  // extern "C"

void* fake::anotherDriverFunction(const std::string& name) {
  if (name == "cuMemsetD32Async") return reinterpret_cast<void*>(&cuMemsetD32Async);
  if (name == "cuMemGetAllocationPropertiesFromHandle")
    return reinterpret_cast<void*>(&cuMemGetAllocationPropertiesFromHandle);
  if (name == "cuGetErrorString") return reinterpret_cast<void*>(&cuGetErrorString);
  return nullptr;
}
