// Streams, launches, events and captures of the fake.
#include "fake_launch.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <utility>

#include "fake_world.h"

using namespace fake;

namespace {

thread_local cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
thread_local double spent_ms = 0;  // on copies from other GPUs

// As a GPU does: what reads a few aligned words meanwhile finds each of them whole.
void copyWhole(void* to, const void* from, size_t bytes) {
  constexpr size_t kFew = 64, kWord = sizeof(uint64_t);
  const uintptr_t odd = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes;
  if (bytes > kFew || odd % kWord != 0) {
    std::memcpy(to, from, bytes);
    return;
  }
  for (size_t i = 0; i < bytes / kWord; ++i)
    __atomic_store_n(static_cast<uint64_t*>(to) + i,
                     __atomic_load_n(static_cast<const uint64_t*>(from) + i, __ATOMIC_ACQUIRE),
                     __ATOMIC_RELEASE);
}

// A stream says which device it is on, and has a number that no other has.
constexpr uintptr_t kStreamsApart = 256;
cudaStream_t streamOn(int ordinal, uintptr_t number) {
  return reinterpret_cast<cudaStream_t>(number * kStreamsApart + static_cast<uintptr_t>(ordinal) +
                                        1);
}
int ordinalOf(cudaStream_t stream) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(stream) % kStreamsApart) - 1;
}

}  // namespace

namespace fake {

void* anotherDriverFunction(const std::string&) {
  return nullptr;
}
cudaError_t besideCaptures() {
  if (!someone_captures || mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  ++captures_ended;
  return cudaErrorStreamCaptureUnsupported;
}
void finish(int) {}
CUresult streamWaitValue32(CUstream, CUdeviceptr, cuuint32_t, unsigned) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult streamWriteValue32(CUstream, CUdeviceptr, cuuint32_t, unsigned) {
  return CUDA_ERROR_NOT_SUPPORTED;
}

}  // namespace fake

extern "C" {

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  if (const auto e = fate()) return said(e);
  *attributes = {};
  attributes->ptxVersion = attributes->binaryVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                void** arguments) {
  if (const auto e = fate()) return said(e);
  if (const auto e = checkLaunch(*config)) return said(e);
  ++launches;
  const Working working;
  if (run_kernel) run_kernel(kernel, arguments, static_cast<int>(config->gridDim.x));
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* other) {
  std::swap(*other, mode);
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status,
                                     unsigned long long*, cudaGraph_t*, const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
// Streams of tests are numbers.
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* number) {
  *number = reinterpret_cast<uintptr_t>(stream);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  if (const auto e = fate()) return said(e);
  *event = reinterpret_cast<cudaEvent_t>(new double);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<double*>(event);
  return said(fateOfReturn());
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  *reinterpret_cast<double*>(event) = spent_ms;
  return said(fate());
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  if (const auto e = fate()) return said(e);
  *milliseconds =
      static_cast<float>(*reinterpret_cast<double*>(to) - *reinterpret_cast<double*>(from));
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t, cudaStream_t, unsigned) {
  return said(cudaErrorIllegalState, "an external record outside of a capture");
}
cudaError_t cudaEventQuery(cudaEvent_t) {
  if (const auto e = besideCaptures()) return said(e);
  if (const auto e = fate()) return said(e);
  return gpu_is_busy ? said(cudaErrorNotReady) : cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) {
  if (const auto e = fate()) return said(e);
  ++streams_held_back;
  return cudaSuccess;
}

// ---- streams

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  if (const auto e = fate()) return said(e);
  const std::lock_guard lock(world().mutex);
  static uintptr_t last = 0;
  *stream = streamOn(currentOrdinal(), ++last);
  world().streams.insert(*stream);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (const auto e = fateOfReturn()) return said(e);
  const std::lock_guard lock(world().mutex);
  world().streams.erase(stream);  // not there if it was forgotten
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t) {
  if (const auto e = besideCaptures()) return said(e);
  if (const auto e = fate()) return said(e);
  return machine().copies_hang ? said(cudaErrorNotReady) : cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  if (const auto e = fate()) return said(e);
  {
    const std::lock_guard lock(world().mutex);
    const int ordinal = ordinalOf(stream);
    if (!world().mayTouch(ordinal, to, bytes) || !world().mayTouch(ordinal, from, bytes))
      undefined("copied memory that the GPU has no access to");
    const Range* source = world().find(from);
    if (source && source->gpu != gpuOf(ordinal)) {
      const double rate = machine().gigabytes_per_s[gpuOf(ordinal)][source->gpu];
      spent_ms += static_cast<double>(bytes) / 1e6 / (rate > 0 ? rate : 300);
    }
    if (machine().peers_hang && source && source->gpu != gpuOf(ordinal)) {
      if (!world().find(to)) undefined("waited for a copy to pageable memory that never ends");
      machine().copies_hang = true;
    }
  }
  const Working working;
  copyWhole(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t stream) {
  if (const auto e = fate()) return said(e);
  {
    const std::lock_guard lock(world().mutex);
    if (!world().mayTouch(ordinalOf(stream), data, bytes))
      undefined("cleared memory that the GPU has no access to");
  }
  const Working working;
  std::memset(data, value, bytes);
  return cudaSuccess;
}

}  // extern "C"
