// ringreduce_cuda_perf: all-reduce on GPUs without torch and Python: that it is right, how fast it
// is and what it does when a rank dies.
//
//     ringreduce_cuda_perf MODE [options]        (--help lists them; benchmarks/cuda/settings.h)
//
// Ranks of one process share one GPU.  Ranks that are processes (processes, kill) have a GPU each
// as far as there are enough, and share them else; every table says which.  What is compared takes
// turns, round by round, in one run; tables have the columns of NCCL's own benchmarks, with the
// median of the rounds and the least and most beside it.
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "../tests/cpp/processes.h"
#include "cuda/bench.h"

using namespace perf;

namespace {

int run(const Settings& settings) {
  switch (settings.mode) {
    case Mode::kCheck:
      return runCheck(settings);
    case Mode::kFloor:
      return runFloor(settings);
    case Mode::kSingle:
      return runSingle(settings);
    case Mode::kLatency:
      return runLatency(settings);
    case Mode::kProcesses:
      return runProcesses(settings);
    case Mode::kKill:
      return runKill(settings);
    case Mode::kBytes:
      return runBytes(settings);
  }
  return kUsage;
}

// Whether ranks are processes.
bool hasProcesses(Mode mode) {
  return mode == Mode::kProcesses || mode == Mode::kKill;
}

// A process that has started CUDA must not be forked any more, so one that will be asks in a child.
// The others do not: profilers and sanitizers want one process.
std::string whyNoGpu(Mode mode) {
  if (!hasProcesses(mode)) return gpu::whyNone();
  return processes::run(1, [](int) {
    if (const std::string why = gpu::whyNone(); !why.empty()) throw std::runtime_error(why);
  })[0];
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  try {
    settings = parse({argv + 1, argv + argc});
  } catch (const UsageError& error) {
    std::fprintf(stderr, "ringreduce_cuda_perf: %s (--help says what there is)\n", error.what());
    return kUsage;
  }
  if (settings.help) {
    std::printf("%s", helpText().c_str());
    return kOk;
  }
  // Read by CUDA and NCCL when they start.  Streams of ranks that wait for each other must not
  // share a queue of the GPU's.  Ranks that are processes have queues of their own, and MPS has too
  // few to give each process 32.
  if (!hasProcesses(settings.mode)) setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 0);
  try {
    if (const std::string why = whyNoGpu(settings.mode); !why.empty()) {
      std::printf("skipped: no GPU (%s)\n", why.c_str());
      return kNotPossible;
    }
    return run(settings);
  } catch (const std::exception& error) {
    std::fflush(stdout);
    std::fprintf(stderr, "ringreduce_cuda_perf: %s\n", error.what());
    return kWrong;
  }
}
