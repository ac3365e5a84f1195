// Launches.  The kernels of PyTorch itself are machine code for GPUs: their launches are refused.
#include "kernels.h"

#include <cuda_runtime_api.h>
#include <cxxabi.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "../fake_world.h"
#include "streams.h"

using namespace fake;

namespace {

struct Kernel {
  size_t argument_bytes;
  FakeBlock block;
};

struct Code {
  std::mutex mutex;
  std::unordered_map<const void*, Kernel> kernels;
  std::vector<std::pair<const void*, const char*>> names;  // of PyTorch's
};
Code& code() {
  static Code* all = new Code;
  return *all;
}

std::string nameOf(const void* kernel) {
  const std::lock_guard lock(code().mutex);
  for (const auto& [at, name] : code().names) {
    if (at != kernel) continue;
    int status = 0;
    char* text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
    if (status != 0) return name;
    const std::string demangled = text;
    std::free(text);
    return demangled;
  }
  return "a kernel that was not registered";
}

thread_local int running_on = kNoGpu;  // of a block's thread

// The multiprocessors of a GPU.  A block takes one for itself, and waits while none is free. Blocks
// are served in the order of the kernels' starts.  Other processes on the GPU are not seen.
class Multiprocessors {
 public:
  void run(int blocks, const std::function<void(int block)>& run_block) {
    std::vector<std::thread> threads;
    std::unique_lock lock(mutex_);
    const uint64_t first = next_;
    next_ += static_cast<uint64_t>(blocks);
    for (int block = 0; block < blocks; ++block) {
      changed_.wait(lock, [&] {
        return served_ == first + static_cast<uint64_t>(block) &&
               taken_ < machine().multiprocessors;
      });
      ++served_, ++taken_;
      changed_.notify_all();
      threads.emplace_back([&, block] {
        run_block(block);
        const std::lock_guard done(mutex_);
        --taken_;
        changed_.notify_all();
      });
    }
    lock.unlock();
    for (std::thread& thread : threads) thread.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t next_ = 0, served_ = 0;
  int taken_ = 0;
};

Multiprocessors& multiprocessorsOf(int ordinal) {
  static auto* all = new Multiprocessors[kMostGpus];
  return all[ordinal];
}

cudaError_t launch(const void* kernel, const cudaLaunchConfig_t& config, void** arguments) {
  if (const auto e = fate()) return said(e);
  if (const auto e = checkLaunch(config)) return said(e);
  CUstream_st& stream = streamOf(config.stream);
  const int ordinal = stream.ordinal, blocks = static_cast<int>(config.gridDim.x);
  Kernel found{};
  {
    const std::lock_guard lock(code().mutex);
    if (const auto at = code().kernels.find(kernel); at != code().kernels.end()) found = at->second;
  }
  if (!found.block) {
    const std::string name = nameOf(kernel);
    if (name.find("spin_kernel") != std::string::npos) {  // torch.cuda._sleep: a cycle is 1 ns
      const std::chrono::nanoseconds time(*static_cast<int64_t*>(arguments[0]));
      return said(put(stream, [time, ordinal] {
        multiprocessorsOf(ordinal).run(1, [&](int) { std::this_thread::sleep_for(time); });
      }));
    }
    return said(cudaErrorNoKernelImageForDevice,
                "a kernel of PyTorch's cannot run on the fake: " + name);
  }
  const auto* bytes = static_cast<const char*>(arguments[0]);
  const auto run = [=, argument = std::vector<char>(bytes, bytes + found.argument_bytes)] {
    multiprocessorsOf(ordinal).run(blocks, [&](int block) {
      running_on = ordinal;
      found.block(kernel, argument.data(), block, blocks);
    });
  };
  if (const auto e = putWork(stream, run)) return said(e);
  static const char* const blocking = std::getenv("CUDA_LAUNCH_BLOCKING");
  if (blocking && std::atoi(blocking) != 0 && !isCapturing(stream)) return said(finish(stream));
  return cudaSuccess;
}

cudaError_t launch(const void* kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                   cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  return launch(kernel, config, arguments);
}

// Between <<<>>> and the launch.
struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;

}  // namespace

extern "C" {

void fakeRegisterKernel(const void* kernel, size_t argument_bytes, FakeBlock block) {
  const std::lock_guard lock(code().mutex);
  code().kernels[kernel] = {argument_bytes, block};
}

void fakePause() {
  do
    std::this_thread::sleep_for(
        std::chrono::microseconds(20));  // there are more threads than cores
  while (ruinOf(running_on));
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                void** arguments) {
  return launch(kernel, *config, arguments);
}
cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments,
                             size_t shared, cudaStream_t stream) {
  return launch(kernel, grid, block, arguments, shared, stream);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  if (const auto e = fate()) return said(e);
  *attributes = {};
  attributes->ptxVersion = attributes->binaryVersion = 90;
  return cudaSuccess;
}

// ---- called by the compiler for a file with kernels, and for <<<>>>

void** __cudaRegisterFatBinary(void*) {
  static void* none = nullptr;
  return &none;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) {
  return 0;
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* kernel, char*, const char* name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  const std::lock_guard lock(code().mutex);
  code().names.emplace_back(kernel, name);
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (configurations.empty()) return said(cudaErrorMissingConfiguration);
  const Configuration& last = configurations.back();
  *grid = last.grid, *block = last.block, *shared = last.shared;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  configurations.pop_back();
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* handle, const void* kernel) {
  *handle = static_cast<cudaKernel_t>(const_cast<void*>(kernel));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               size_t shared, cudaStream_t stream) {
  return launch(kernel, grid, block, arguments, shared, stream);
}

}  // extern "C"
