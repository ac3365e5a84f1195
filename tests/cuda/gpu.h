// CUDA for tests and benchmarks: owners free memory, errors are thrown, and every wait ends.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "cuda/cuda_errors.h"

namespace gpu {

// Throws unless `result` is success; `doing` follows "cannot".
inline void must(cudaError_t result, std::string_view doing) {
  ringreduce::cuda::check(result, doing);
}

// Why this process has no GPU; "" if it has one.  Starts CUDA: do not fork afterwards.
inline std::string whyNone() {
  int devices = 0;
  const cudaError_t result = cudaGetDeviceCount(&devices);
  if (result != cudaSuccess) return cudaGetErrorString(result);
  return devices > 0 ? "" : "there is no GPU";
}

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes) : bytes_(bytes) {
    void* memory = nullptr;
    must(cudaMalloc(&memory, bytes),
         "take " + std::to_string(bytes) + " bytes of the GPU's memory");
    data_ = static_cast<std::byte*>(memory);
  }
  Buffer(std::shared_ptr<void> memory, size_t bytes)
      : data_(static_cast<std::byte*>(memory.get())), bytes_(bytes), owner_(std::move(memory)) {}
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(owner_, other.owner_);
    return *this;
  }
  // After an error of the GPU's there is nothing to free.
  ~Buffer() {
    if (!owner_) (void)cudaFree(data_);
  }

  std::byte* get() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  std::shared_ptr<void> owner_;  // null: cudaMalloc's
};

// Memory of the host that copies are fast from.
class PinnedBuffer {
 public:
  explicit PinnedBuffer(size_t bytes) {
    void* memory = nullptr;
    must(cudaMallocHost(&memory, bytes), "pin " + std::to_string(bytes) + " bytes of memory");
    data_ = static_cast<std::byte*>(memory);
  }
  ~PinnedBuffer() { (void)cudaFreeHost(data_); }
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;
  std::byte* get() const { return data_; }

 private:
  std::byte* data_ = nullptr;
};

class Stream {
 public:
  Stream() { must(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "make a stream"); }
  Stream(Stream&& other) noexcept : stream_(std::exchange(other.stream_, nullptr)) {}
  Stream& operator=(Stream&&) = delete;
  ~Stream() {
    if (stream_) (void)cudaStreamDestroy(stream_);
  }
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// A point in a stream, with its time.
class Mark {
 public:
  Mark() { must(cudaEventCreate(&event_), "make an event"); }
  Mark(Mark&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Mark& operator=(Mark&&) = delete;
  ~Mark() {
    if (event_) (void)cudaEventDestroy(event_);
  }
  void record(cudaStream_t stream) const { must(cudaEventRecord(event_, stream), "mark a stream"); }
  void holdBack(cudaStream_t stream) const {
    must(cudaStreamWaitEvent(stream, event_, 0), "order two streams");
  }
  // Seconds from `earlier` to this; both must have been passed.
  double since(const Mark& earlier) const {
    float milliseconds = 0;
    must(cudaEventElapsedTime(&milliseconds, earlier.event_, event_), "read a time");
    return milliseconds / 1e3;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

inline constexpr ringreduce::Nanos kHang = 30 * ringreduce::kSecond;  // nothing takes that long

// Whether the stream comes to its end before `longest` is over.
inline bool ends(cudaStream_t stream, ringreduce::Nanos longest) {
  const ringreduce::Nanos deadline = ringreduce::deadlineIn(longest);
  for (;;) {
    const cudaError_t state = cudaStreamQuery(stream);
    if (state == cudaSuccess) return true;
    if (state != cudaErrorNotReady) must(state, "wait for the GPU");
    (void)cudaGetLastError();  // the runtime keeps "not ready" as the thread's last error
    if (ringreduce::now() > deadline) return false;
    std::this_thread::yield();
  }
}

inline void finish(cudaStream_t stream, const std::string& what) {
  if (!ends(stream, kHang)) throw std::runtime_error(what + " does not come to an end on the GPU");
}

template <class T>
std::vector<T> fromGpu(const void* from, size_t n) {
  std::vector<T> host(n);
  must(cudaMemcpy(host.data(), from, n * sizeof(T), cudaMemcpyDeviceToHost), "copy from the GPU");
  return host;
}

// For programs whose ranks share one process.  77 tells ctest that there is no GPU.
template <class Tests>
int mainOf(Tests tests) {
  // Streams of ranks that wait for each other must not share a queue of the GPU's.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  if (const std::string why = whyNone(); !why.empty()) {
    std::printf("skipped: no GPU (%s)\n", why.c_str());
    return 77;
  }
  return tests();
}

}  // namespace gpu
