// The functions of the CUDA driver, found at run time.
//
// Nothing links to libcuda.so, which only machines with an NVIDIA driver have, so that this library
// can be loaded everywhere; the CUDA runtime, which is linked in, finds the driver if there is one.
// Each function is asked for by the version of its interface, so that a newer driver gives the one
// that is declared here.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

namespace ringreduce::cuda {

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

}  // namespace ringreduce::cuda
