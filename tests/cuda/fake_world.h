// What the fake's driver and runtime have in common: the GPUs, who has mapped what, which call
// fails.
#pragma once

#include <cuda.h>
#include <sys/types.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "fake_cuda.h"

namespace fake {

// Stops the program after a call whose effect CUDA leaves undefined.
[[noreturn]] void undefined(const char* what);

// The fate of a call, as far as `failAt` has a say, and that of one that gives something back.
cudaError_t fate();
cudaError_t fateOfReturn();

// Keeps it as the calling thread's last error, as the runtime does, and returns it.  `words`: what
// cudaGetErrorString says of it.
cudaError_t said(cudaError_t error, const std::string& words = "as the fake says");

inline CUresult asDriver(cudaError_t error) {
  return static_cast<CUresult>(error);
}

// ---- GPUs: a number in the machine, an ordinal in a process

int count();
int gpuOf(int ordinal);
bool reaches(int gpu, int other);
inline thread_local std::vector<int> contexts;  // of ordinals
inline int currentOrdinal() {
  return contexts.empty() ? 0 : contexts.back();
}

// ---- memory

// At the end of each memfd, shared by all processes that map it.
struct Tail {
  int gpu;
  unsigned exportable;            // a CUmemAllocationHandleType
  std::atomic<pid_t> openers[8];  // processes that have it open by IPC
};
Tail* tailOf(int fd);
void drop(Tail* tail);
template <class F>
auto withTail(int fd, F&& f) {
  Tail* tail = tailOf(fd);
  const auto result = f(*tail);
  drop(tail);
  return result;
}

// Whether a process other than those that have ended has it open.
bool isOpen(const Tail& tail);

// A new memfd, full of rubbish as GPU memory is.
int newMemory(int gpu, size_t bytes, unsigned exportable);
size_t bytesIn(int fd);
// Maps it as `gpu` would, at `place` if that is not null.
char* show(int fd, size_t bytes, int gpu, int protection, void* place = nullptr);

struct Physical {
  int fd, references;
};

// A mapped range, by its address.
struct Range {
  enum class Kind { kPlain, kOpened, kVirtual } kind;
  size_t bytes;
  int gpu;  // whose memory
  int fd;
  std::set<int> access = {};  // ordinals
  int times = 1;              // opened
};

struct World {
  std::mutex mutex;  // of all below
  std::map<char*, Range> ranges;
  std::map<char*, size_t> reservations, registered;
  std::map<CUmemGenericAllocationHandle, Physical> handles;
  std::set<std::pair<int, int>> peers;  // ordinals: the first may touch the second's plain memory
  CUmemGenericAllocationHandle next_handle = 1;
  int streams = 0;

  // The range that contains it, or null.
  Range* find(const void* pointer, char** base = nullptr);
  // Whether copies on `ordinal` may touch these bytes; those of the host they always may.
  bool mayTouch(int ordinal, const void* pointer, size_t bytes);
};
World& world();

void* driverFunction(const std::string& name);  // null if there is none

// ---- in fake_launch.cc, or in torch_on_fake

void* anotherDriverFunction(const std::string& name);  // that is not in gpu_device.h, or null

// Waits for what this process has put into the streams of a GPU, as CUDA does before it gives
// memory back.
void finish(int gpu);
CUresult streamWaitValue32(CUstream stream, CUdeviceptr word, cuuint32_t value, unsigned flags);
CUresult streamWriteValue32(CUstream stream, CUdeviceptr word, cuuint32_t value, unsigned flags);

}  // namespace fake
