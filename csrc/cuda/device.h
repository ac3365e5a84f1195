// Facts about a GPU, and the calling thread's place on one.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <string>

namespace ringreduce::cuda {

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

// How many this process sees; 0 where there is no driver.  Throws CudaError where there is one that
// cannot be used.
int deviceCount();

// The ordinal of the one with this UUID, or -1 if this process does not see it.
int findDevice(const std::string& uuid);

// Makes a GPU the calling thread's for a scope.
//
// By the driver's stack of contexts and not by cudaSetDevice, which could not be undone: to set the
// former device again would create a context on it, hundreds of megabytes, where there was none.
class OnDevice {
 public:
  explicit OnDevice(int ordinal);  // throws CudaError
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  const int ordinal_;
};

}  // namespace ringreduce::cuda
