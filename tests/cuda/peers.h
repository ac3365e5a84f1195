// For tests of GPU memory between ranks: ranks on GPUs, as processes or as threads.
//
// The same tests run on GPUs and on the fake (fake_cuda.h).  The test's own process never calls
// CUDA before the last rank process has been forked, so it asks a child whether there is a GPU.
#pragma once

#include <cuda.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <functional>
#include <vector>

#include "check.h"
#include "cuda/cuda_errors.h"
#include "cuda/gpu_device.h"
#include "cuda/memory/device_memory.h"
#include "processes.h"
#include "ranks.h"

namespace peers {

using namespace ringreduce;
using namespace ringreduce::cuda;

inline constexpr int kSkipped = 77;  // the exit status that says so

// How many GPUs there are.
inline int gpus() {
  static const int count = [] {
    const pid_t child = fork();
    if (child == 0) _exit(deviceCount());
    int status = 0;
    waitpid(child, &status, 0);
    return WEXITSTATUS(status);
  }();
  return count;
}

// Memory like torch's expandable segments: handles of one granule each, mapped side by side.
class Segments {
 public:
  Segments(int device, int count, bool exportable)
      : device_(device), granule_(exportGranularity(device)) {
    const OnDevice here(device);
    cuda::check(driver().memAddressReserve(&base_, bytes(count), 0, 0, 0), "reserve");
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
    if (exportable) properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    for (; count_ < count; ++count_) {
      CUmemGenericAllocationHandle handle = 0;
      cuda::check(driver().memCreate(&handle, granule_, &properties, 0), "create");
      cuda::check(driver().memMap(base_ + bytes(count_), granule_, 0, handle, 0), "map");
      cuda::check(driver().memRelease(handle), "release");
    }
    const CUmemAccessDesc access{.location = properties.location,
                                 .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    cuda::check(driver().memSetAccess(base_, bytes(count), &access, 1), "get access");
  }
  ~Segments() {
    const OnDevice here(device_);
    for (int i = 0; i < count_; ++i)
      checkQuietly(driver().memUnmap(base_ + bytes(i), granule_), "unmap", device_);
    checkQuietly(driver().memAddressFree(base_, bytes(count_)), "free", device_);
  }
  std::byte* data() const { return reinterpret_cast<std::byte*>(base_); }
  size_t granule() const { return granule_; }
  size_t bytes() const { return bytes(count_); }

 private:
  size_t bytes(int count) const { return static_cast<size_t>(count) * granule_; }

  const int device_;
  const size_t granule_;
  int count_ = 0;
  CUdeviceptr base_ = 0;
};

enum class As { kProcesses, kThreads };

using Body = std::function<void(Group&, int device)>;

// Rank r is on GPU r, or shares one where there are fewer.
inline void run(As as, int size, const Body& body, const std::vector<int>& doomed = {}) {
  const int count = gpus();
  const auto one = [&](Group& group) { body(group, group.rank() % count); };
  const GroupOptions options{.name = "test", .timeout = 60 * kSecond};
  if (as == As::kProcesses)
    processes::inGroup(size, one, options, doomed);
  else
    ranks::inGroup(size, one, options);
}

inline int main(int argc, char** argv) {
  if (gpus() == 0) {
    std::printf("skipped: no GPU\n");
    return kSkipped;
  }
  return check::runAll(argc > 1 ? argv[1] : nullptr);
}

}  // namespace peers
