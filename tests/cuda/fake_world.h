// What the fake's driver and runtime have in common: the GPUs, who has mapped what, which call
// fails.
#pragma once

#include <cuda.h>
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "fake_cuda.h"

namespace fake {

// Stops the program after a call whose effect CUDA leaves undefined.
[[noreturn]] void undefined(const char* what);

// The fate of a call on a GPU, as far as `failAt` and `ruin` have a say, and that of one that gives
// something back.
inline constexpr int kNoGpu = -1;  // asks for facts
cudaError_t fate(int ordinal);
cudaError_t fateOfReturn(int ordinal);
cudaError_t fate();  // on the current one
cudaError_t fateOfReturn();
// What has ruined it, or success.
cudaError_t ruinOf(int ordinal);

// Keeps it as the calling thread's last error, as the runtime does, and returns it.  `words`: what
// cudaGetErrorString says of it; "": something.
cudaError_t said(cudaError_t error, const std::string& words = "");

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

// Of a multicast object: the GPUs that were added, and what they have bound.
struct Team {
  unsigned wanted;  // GPUs; 0: it is memory
  std::atomic<unsigned> added, bound;
  struct Member {
    std::atomic<int> gpu;  // plus 1
    std::atomic<pid_t> pid;
    std::atomic<int> fd;  // of its memory, in that process; plus 1
  } members[kMostGpus];
};

// At the end of each memfd, shared by all processes that map it.
struct Tail {
  int gpu;
  unsigned exportable;            // a CUmemAllocationHandleType
  std::atomic<pid_t> openers[8];  // processes that have it open by IPC
  Team team;
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
int newMulticast(size_t bytes, unsigned exportable, unsigned gpus);
size_t bytesIn(int fd);
// Maps it as `gpu` would, at `place` if that is not null.  Nobody can touch it before `reveal`.
char* show(int fd, size_t bytes, int gpu, void* place = nullptr);

struct Physical {
  int fd, references;
};

// A mapped range, by its address.
struct Range {
  enum class Kind { kPlain, kOpened, kVirtual } kind;
  size_t bytes;
  int gpu;  // whose memory
  int fd;
  std::set<int> access = {};        // ordinals
  int times = 1;                    // opened
  pid_t exporter = 0;               // of what is opened
  bool is_gone = false;             // with the exporter
  bool is_multicast = false;        // only `targets` may be touched
  std::vector<char*> targets = {};  // where this process sees what is bound, once it was asked
  bool isMapped() const {
    return !is_multicast && !is_gone && (kind != Kind::kVirtual || !access.empty());
  }
};

// Whether a GPU takes a grid of such a shape.
cudaError_t checkLaunch(const cudaLaunchConfig_t& config);

struct World {
  using Clock = std::chrono::steady_clock;

  std::mutex mutex;  // of all below
  std::map<char*, Range> ranges;
  std::map<char*, size_t> reservations, registered;
  std::map<CUmemGenericAllocationHandle, Physical> handles;
  std::set<std::pair<int, int>> peers;  // ordinals: the first may touch the second's plain memory
  CUmemGenericAllocationHandle next_handle = 1;
  std::set<std::string> unmappers;  // names of the threads that have unmapped or closed memory
  std::set<CUstream> streams;
  std::map<std::pair<ino_t, int>, int> bound;  // descriptors of memory, by object and GPU
  int working = 0;                             // kernels and copies that run
  int maps_refused = 0;
  bool hidden = true;  // nobody can touch GPU memory
  Clock::time_point hidden_at = {};

  // The range that contains it, or null.
  Range* find(const void* pointer, char** base = nullptr);
  // Whether copies on `ordinal` may touch these bytes; those of the host they always may.
  bool mayTouch(int ordinal, const void* pointer, size_t bytes);
  // Lets a new range be touched, if one may now.
  void reveal(char* base, const Range& range) const;
  // Mappings of legacy IPC end with the process that they came from: who touches one afterwards is
  // stopped.  Starts to watch that process.
  void endWith(pid_t exporter);
  // With the lock held: the calling thread unmaps.
  void noteUnmapper();
};
World& world();

// A kernel or a copy runs.  Only meanwhile can this process touch GPU memory; if it was hidden less
// than 20 ms before, until the next one ends, since each change costs time for each page.
class Working {
 public:
  Working();
  ~Working();
  Working(const Working&) = delete;
  Working& operator=(const Working&) = delete;
};

// Where this process sees the memory of all GPUs that a multicast address stands for.
extern "C" int fakeMulticast(const void* address, void** places);

void* driverFunction(const std::string& name);  // null if there is none

// ---- in fake_launch.cc, or in torch_on_fake

void* anotherDriverFunction(const std::string& name);  // that is not in gpu_device.h, or null

// CUDA's answer to calls that are not safe beside a capture, which they end: that of
// cudaThreadExchangeStreamCaptureMode's documentation.
cudaError_t besideCaptures();

// Waits for what this process has put into the streams of a GPU, as CUDA does before it gives
// memory back.
void finish(int gpu);
// The same for the GPUs of all that is mapped in a range, and for those that may touch it.
void finishWorkOn(const void* data, size_t bytes);
CUresult streamWaitValue32(CUstream stream, CUdeviceptr word, cuuint32_t value, unsigned flags);
CUresult streamWriteValue32(CUstream stream, CUdeviceptr word, cuuint32_t value, unsigned flags);

}  // namespace fake
