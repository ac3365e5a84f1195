// Facts about GPUs, the functions of CUDA's driver, and the GPUs that this library was compiled
// for.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

#include <cstddef>
#include <string>
#include <vector>

namespace ringreduce::cuda {

// ---- CUDA's driver
//
// Its functions are found at run time, by the CUDA runtime.  Nothing links to libcuda.so, which
// only machines with an NVIDIA driver have, so this library can be loaded everywhere.  Each
// function is asked for by the version of its interface, which newer drivers keep.

// (name here, name in the driver, version of the interface: none later than 12.4)
#define RINGREDUCE_DRIVER_FUNCTIONS(F)                                         \
  F(getErrorName, cuGetErrorName, 6000)                                        \
  F(getErrorString, cuGetErrorString, 6000)                                    \
  F(deviceGet, cuDeviceGet, 2000)                                              \
  F(deviceGetUuid, cuDeviceGetUuid, 11040)                                     \
  F(deviceGetAttribute, cuDeviceGetAttribute, 2000)                            \
  F(devicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, 7000)                    \
  F(ctxPushCurrent, cuCtxPushCurrent, 4000)                                    \
  F(ctxPopCurrent, cuCtxPopCurrent, 4000)                                      \
  F(memCreate, cuMemCreate, 10020)                                             \
  F(memRelease, cuMemRelease, 10020)                                           \
  F(memAddressReserve, cuMemAddressReserve, 10020)                             \
  F(memAddressFree, cuMemAddressFree, 10020)                                   \
  F(memMap, cuMemMap, 10020)                                                   \
  F(memUnmap, cuMemUnmap, 10020)                                               \
  F(memSetAccess, cuMemSetAccess, 10020)                                       \
  F(memGetAllocationGranularity, cuMemGetAllocationGranularity, 10020)         \
  F(memExportToShareableHandle, cuMemExportToShareableHandle, 10020)           \
  F(memImportFromShareableHandle, cuMemImportFromShareableHandle, 10020)       \
  F(memRetainAllocationHandle, cuMemRetainAllocationHandle, 11000)             \
  F(memGetAllocationProperties, cuMemGetAllocationPropertiesFromHandle, 10020) \
  F(memGetAddressRange, cuMemGetAddressRange, 3020)                            \
  F(pointerGetAttribute, cuPointerGetAttribute, 4000)                          \
  F(streamWaitValue32, cuStreamWaitValue32, 11070)                             \
  F(streamWriteValue32, cuStreamWriteValue32, 11070)

struct Driver {
#define RINGREDUCE_MEMBER(member, function, version) PFN_##function##_v##version member;
  RINGREDUCE_DRIVER_FUNCTIONS(RINGREDUCE_MEMBER)
#undef RINGREDUCE_MEMBER
};

// Found once.  Throws CudaError where there is no driver, or one that is too old.
const Driver& driver();

// ---- GPUs

struct Device {
  int ordinal;       // in this process: CUDA_VISIBLE_DEVICES hides and renumbers
  std::string uuid;  // as nvidia-smi shows it: "GPU-..." or "MIG-...", the same in all processes
  std::string name;
  int compute_capability;  // 90 for 9.0
  int multiprocessors;
  size_t l2_bytes, memory_bytes;

  bool exports_memory;      // memory of it can be handed to other processes as a descriptor (VMM)
  bool may_have_ipc;        // legacy CUDA IPC: a hint, only trying tells
  bool mps;                 // processes share it through MPS: their kernels run at the same time
  bool cooperative_launch;  // all blocks of a grid can be made to run at the same time
  bool native_host_atomics;
  bool stream_wait_64;  // stream waits and writes of 64 bits; those of 32 bits are everywhere
  bool registers_host_memory;
  bool same_host_pointer;  // registered host memory has the same address on it

  // "GPU 0 (NVIDIA H200, GPU-1234...)"
  std::string shown() const;
};

// Throws CudaError.
Device describeDevice(int ordinal);

// The number that this process sees; 0 without a driver.  Throws CudaError if the driver cannot be
// used.
int deviceCount();

// The ordinal of the one with this UUID, or -1 if this process does not see it.
int findDevice(const std::string& uuid);

// Makes a GPU the calling thread's for a scope, by the driver's stack of contexts.  cudaSetDevice
// could not be undone: setting the former device again may create a context of hundreds of
// megabytes on it.
class OnDevice {
 public:
  explicit OnDevice(int ordinal);  // throws CudaError
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  const int ordinal_;
};

// ---- the build

// The compiler, and the GPUs that the code was compiled for.
struct BuildInfo {
  int toolkit;  // the runtime's own number: 13000 is CUDA 13.0
  // Compute capabilities (90 is 9.0) with machine code, lowest first.  Other GPUs from the first on
  // compile the PTX of a listed one.
  std::vector<int> architectures;

  // As in "13.0, sm_80 sm_90 and newer".
  std::string text() const;
};

BuildInfo buildInfo();

}  // namespace ringreduce::cuda
