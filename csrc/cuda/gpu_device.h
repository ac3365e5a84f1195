// Facts about GPUs, and the GPUs that this library was compiled for.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace ringreduce::cuda {

struct Device {
  int ordinal;       // in this process: CUDA_VISIBLE_DEVICES hides and renumbers
  std::string uuid;  // as nvidia-smi shows it: "GPU-..." or "MIG-...", the same in all processes
  std::string name;
  int compute_capability;  // 90 for 9.0
  int multiprocessors;
  size_t l2_bytes, memory_bytes;

  bool exports_memory;     // memory of it can be handed to other processes as a descriptor (VMM)
  bool may_have_ipc;       // legacy CUDA IPC: a hint, only trying tells
  bool mps;                // processes share it through MPS: their kernels run at the same time
  bool ends_long_kernels;  // a GPU of a display, or of Windows under WSL: kernels have a time limit
  bool multicasts;         // an NVSwitch adds its memory to that of other GPUs
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
// Whether two GPUs of this process have NVLink between them.  False for -1.
bool areLinked(int device, int peer);

// Lets this thread allocate, register, ask and wait while another thread captures a stream in the
// mode `global`, the usual one.  CUDA would otherwise refuse these calls and end the capture.
class BesideCaptures {
 public:
  BesideCaptures();
  ~BesideCaptures();
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  const int mode_;  // a cudaStreamCaptureMode: the one before
};

// Makes a GPU the calling thread's for a scope, beside captures, by the driver's stack of contexts.
// cudaSetDevice could not be undone: setting the former device again may create a context of
// hundreds of megabytes on it.
class OnDevice {
 public:
  explicit OnDevice(int ordinal);  // throws CudaError
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  const BesideCaptures beside_;
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
