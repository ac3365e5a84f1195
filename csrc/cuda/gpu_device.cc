// Asks the driver and the runtime.
#include "cuda/gpu_device.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "base/text.h"
#include "cuda/cuda_errors.h"

namespace ringreduce::cuda {

namespace {

int countDevices() {
  int count = 0;
  check(cudaGetDeviceCount(&count), "count the GPUs", kNoDevice);
  return count;
}

CUdevice handleOf(int ordinal) {
  // The driver numbers GPUs as the runtime does; the runtime initialises it.
  const int count = countDevices();
  if (ordinal < 0 || ordinal >= count)
    raise(
        cudaErrorInvalidDevice,
        "use GPU " + std::to_string(ordinal) + " of " + std::to_string(count) + " in this process",
        kNoDevice);
  CUdevice device = 0;
  check(driver().deviceGet(&device, ordinal), "find the GPU", ordinal);
  return device;
}

// 0 if the driver is older than the attribute.
int attribute(CUdevice device, CUdevice_attribute which) {
  int value = 0;
  const CUresult result = driver().deviceGetAttribute(&value, which, device);
  if (result == CUDA_ERROR_INVALID_VALUE) return 0;
  check(result, "ask for an attribute", device);
  return value;
}

std::string hyphenated(const CUuuid& uuid) {
  std::string text = hexText(uuid.bytes, sizeof uuid.bytes);
  for (const size_t at : {8U, 13U, 18U, 23U}) text.insert(at, 1, '-');
  return text;
}

// A part of a GPU (MIG) has its own UUID.  The interface's first version gives that of the whole.
bool isPart(const CUuuid& own, CUdevice device) {
#if CUDART_VERSION >= 12050
  void* function = nullptr;
  cudaDriverEntryPointQueryResult answer = cudaDriverEntryPointSymbolNotFound;
  if (cudaGetDriverEntryPointByVersion("cuDeviceGetUuid", &function, 9020, cudaEnableDefault,
                                       &answer) != cudaSuccess ||
      answer != cudaDriverEntryPointSuccess) {
    (void)cudaGetLastError();
    return false;
  }
  CUuuid whole{};
  check(reinterpret_cast<PFN_cuDeviceGetUuid_v9020>(function)(&whole, device),
        "ask for the UUID of the whole", device);
  return std::memcmp(&whole, &own, sizeof own) != 0;
#else
  (void)own, (void)device;
  return false;
#endif
}

std::string uuidOf(int ordinal, CUdevice device) {
  CUuuid uuid{};
  check(driver().deviceGetUuid(&uuid, device), "ask for the UUID", ordinal);
  return (isPart(uuid, device) ? "MIG-" : "GPU-") + hyphenated(uuid);
}

// Kept until the process ends, as by the runtime: the last release would free memory.
CUcontext contextOf(int ordinal) {
  static auto* mutex = new std::mutex;  // never destroyed: memory may be freed at exit
  static auto* known = new std::map<int, CUcontext>;
  const std::lock_guard lock(*mutex);
  const auto found = known->find(ordinal);
  if (found != known->end()) return found->second;
  CUcontext context = nullptr;
  check(driver().devicePrimaryCtxRetain(&context, handleOf(ordinal)), "start using CUDA", ordinal);
  return (*known)[ordinal] = context;
}

// Returns the mode before.  Where CUDA cannot be used, the calls that follow say so.
cudaStreamCaptureMode exchange(cudaStreamCaptureMode mode) {
  if (cudaThreadExchangeStreamCaptureMode(&mode) != cudaSuccess) (void)cudaGetLastError();
  return mode;
}

}  // namespace

std::string Device::shown() const {
  return "GPU " + std::to_string(ordinal) + " (" + name + ", " + uuid + ")";
}

Device describeDevice(int ordinal) {
  const CUdevice device = handleOf(ordinal);
  const auto has = [&](CUdevice_attribute which) { return attribute(device, which) != 0; };
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, ordinal), "ask for the properties", ordinal);
  return {
      .ordinal = ordinal,
      .uuid = uuidOf(ordinal, device),
      .name = properties.name,
      .compute_capability = 10 * properties.major + properties.minor,
      .multiprocessors = properties.multiProcessorCount,
      .l2_bytes = static_cast<size_t>(properties.l2CacheSize),
      .memory_bytes = properties.totalGlobalMem,
      .exports_memory = has(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) &&
                        has(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED),
      .may_have_ipc = has(CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED),
      .mps = has(CU_DEVICE_ATTRIBUTE_MPS_ENABLED),
      .ends_long_kernels = has(CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT),
      .multicasts = has(CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED),
      .cooperative_launch = has(CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH),
      .native_host_atomics = has(CU_DEVICE_ATTRIBUTE_HOST_NATIVE_ATOMIC_SUPPORTED),
      .stream_wait_64 = has(CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS),
      .registers_host_memory = has(CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED),
      .same_host_pointer = has(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM),
  };
}

int deviceCount() {
  try {
    return countDevices();
  } catch (const CudaError& error) {
    if (error.is(cudaErrorInsufficientDriver) || error.is(cudaErrorStubLibrary) ||
        error.is(cudaErrorNoDevice))
      return 0;
    throw;
  }
}

int findDevice(const std::string& uuid) {
  for (int i = 0, n = countDevices(); i < n; ++i)
    if (uuidOf(i, handleOf(i)) == uuid) return i;
  return -1;
}

bool areLinked(int device, int peer) {
  int atomics = 0;  // PCIe has none between GPUs
  if (peer >= 0)
    check(cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, device, peer),
          "ask how GPUs are linked", device);
  return atomics != 0;
}

BesideCaptures::BesideCaptures() : mode_(exchange(cudaStreamCaptureModeRelaxed)) {}

BesideCaptures::~BesideCaptures() {
  exchange(static_cast<cudaStreamCaptureMode>(mode_));
}

OnDevice::OnDevice(int ordinal) : ordinal_(ordinal) {
  check(driver().ctxPushCurrent(contextOf(ordinal)), "use the GPU in this thread", ordinal);
}

OnDevice::~OnDevice() {
  CUcontext context = nullptr;
  checkQuietly(driver().ctxPopCurrent(&context), "leave the GPU in this thread", ordinal_);
}

}  // namespace ringreduce::cuda
