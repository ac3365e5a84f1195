// CUDA's driver, and errors of CUDA as this project's Error: the action, the GPU, CUDA's name and
// text of the error, and advice.
//
// After some errors CUDA answers every further call of the process with the same error: the process
// must be started again, as the message then says.  kRuins (cuda_errors.cc) lists these errors;
// docs/gpu.md has the same list for users.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <optional>
#include <string>
#include <string_view>

#include "base/error.h"

namespace ringreduce::cuda {

inline constexpr int kCurrentDevice = -1;  // that of the calling thread
inline constexpr int kNoDevice = -2;       // none is concerned

class CudaError : public Error {
 public:
  // `code` is a cudaError_t or a CUresult: they have the same numbers where they mean the same.
  CudaError(Failure kind, int code, const std::string& what) : Error(kind, what), code_(code) {}
  int code() const { return code_; }
  bool is(cudaError_t error) const { return code_ == static_cast<int>(error); }
  bool ruinsProcess() const;

 private:
  int code_;
};

// Why no process can use its GPU after this error; null if it can.
const char* ruinOf(int code);
inline bool ruinsProcess(cudaError_t error) {
  return ruinOf(error) != nullptr;
}
inline bool ruinsProcess(CUresult error) {
  return ruinOf(error) != nullptr;
}

// "cannot <tried> on GPU 0: cudaErrorMemoryAllocation (out of memory). Free GPU memory ..."
std::string describe(cudaError_t error, std::string_view tried, int device = kCurrentDevice);
std::string describe(CUresult error, std::string_view tried, int device = kCurrentDevice);

// Throws CudaError.  Clears the error that the CUDA runtime keeps for this thread: torch asks for
// it after every launch, and must not take it for its own.
[[noreturn]] void raise(cudaError_t error, std::string_view tried, int device = kCurrentDevice,
                        Failure kind = Failure::kSetup);
[[noreturn]] void raise(CUresult error, std::string_view tried, int device = kCurrentDevice,
                        Failure kind = Failure::kSetup);

// Throws unless `result` is success.  `tried` follows "cannot": "allocate GPU memory".
inline void check(cudaError_t result, std::string_view tried, int device = kCurrentDevice,
                  Failure kind = Failure::kSetup) {
  if (result != cudaSuccess) [[unlikely]]
    raise(result, tried, device, kind);
}
inline void check(CUresult result, std::string_view tried, int device = kCurrentDevice,
                  Failure kind = Failure::kSetup) {
  if (result != CUDA_SUCCESS) [[unlikely]]
    raise(result, tried, device, kind);
}

// For destructors: logs the error, except when CUDA is gone because the process ends, and after an
// error that ruined the process, which has been reported.
void checkQuietly(cudaError_t result, std::string_view tried, int device) noexcept;
void checkQuietly(CUresult result, std::string_view tried, int device) noexcept;

// ---- CUDA's driver
//
// Its functions are found at run time, by the CUDA runtime.  Nothing links to libcuda.so, which
// only machines with an NVIDIA driver have, so this library can be loaded everywhere.  Each
// function is asked for by the version of its interface, which newer drivers keep.

// (name here, name in the driver, version of the interface: none later than 12.4)
#define RINGREDUCE_DRIVER_FUNCTIONS(F)                                   \
  F(getErrorName, cuGetErrorName, 6000)                                  \
  F(getErrorString, cuGetErrorString, 6000)                              \
  F(deviceGet, cuDeviceGet, 2000)                                        \
  F(deviceGetUuid, cuDeviceGetUuid, 11040)                               \
  F(deviceGetAttribute, cuDeviceGetAttribute, 2000)                      \
  F(devicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, 7000)              \
  F(ctxPushCurrent, cuCtxPushCurrent, 4000)                              \
  F(ctxPopCurrent, cuCtxPopCurrent, 4000)                                \
  F(memCreate, cuMemCreate, 10020)                                       \
  F(memRelease, cuMemRelease, 10020)                                     \
  F(memAddressReserve, cuMemAddressReserve, 10020)                       \
  F(memAddressFree, cuMemAddressFree, 10020)                             \
  F(memMap, cuMemMap, 10020)                                             \
  F(memUnmap, cuMemUnmap, 10020)                                         \
  F(memSetAccess, cuMemSetAccess, 10020)                                 \
  F(memGetAllocationGranularity, cuMemGetAllocationGranularity, 10020)   \
  F(memExportToShareableHandle, cuMemExportToShareableHandle, 10020)     \
  F(memImportFromShareableHandle, cuMemImportFromShareableHandle, 10020) \
  F(memRetainAllocationHandle, cuMemRetainAllocationHandle, 11000)       \
  F(streamWaitValue32, cuStreamWaitValue32, 11070)                       \
  F(streamWriteValue32, cuStreamWriteValue32, 11070)

struct Driver {
#define RINGREDUCE_MEMBER(member, function, version) PFN_##function##_v##version member;
  RINGREDUCE_DRIVER_FUNCTIONS(RINGREDUCE_MEMBER)
};

// Found once.  Throws CudaError where there is no driver, or one that is too old.
const Driver& driver();

// Multicast objects, which only drivers from CUDA 12.1 on know.
#define RINGREDUCE_MULTICAST_FUNCTIONS(F)            \
  F(multicastCreate, cuMulticastCreate, 12010)       \
  F(multicastAddDevice, cuMulticastAddDevice, 12010) \
  F(multicastBindMem, cuMulticastBindMem, 12010)     \
  F(multicastUnbind, cuMulticastUnbind, 12010)       \
  F(multicastGetGranularity, cuMulticastGetGranularity, 12010)

struct MulticastDriver {
  RINGREDUCE_MULTICAST_FUNCTIONS(RINGREDUCE_MEMBER)
};
#undef RINGREDUCE_MEMBER
const MulticastDriver& multicastDriver();

}  // namespace ringreduce::cuda
