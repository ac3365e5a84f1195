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
