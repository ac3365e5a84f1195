// Launches.  The kernels of PyTorch itself are machine code for GPUs: their launches are refused.
#include "kernels.h"

#include <cuda_runtime_api.h>
#include <cxxabi.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
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

cudaError_t launch(const void* kernel, int blocks, void** arguments, cudaStream_t stream) {
  if (const auto e = fate()) return said(e);
  Kernel found{};
  {
    const std::lock_guard lock(code().mutex);
    if (const auto at = code().kernels.find(kernel); at != code().kernels.end()) found = at->second;
  }
  if (!found.block) {
    const std::string name = nameOf(kernel);
    if (name.find("spin_kernel") != std::string::npos) {  // torch.cuda._sleep: a cycle is 1 ns
      const std::chrono::nanoseconds time(*static_cast<int64_t*>(arguments[0]));
      put(streamOf(stream), [time] { std::this_thread::sleep_for(time); });
      return cudaSuccess;
    }
    return said(cudaErrorNoKernelImageForDevice,
                "a kernel of PyTorch's cannot run on the fake: " + name);
  }
  const auto* bytes = static_cast<const char*>(arguments[0]);
  put(streamOf(stream), [=, argument = std::vector<char>(bytes, bytes + found.argument_bytes)] {
    std::vector<std::thread> others;
    for (int block = 1; block < blocks; ++block)
      others.emplace_back([&, block] { found.block(kernel, argument.data(), block, blocks); });
    found.block(kernel, argument.data(), 0, blocks);
    for (std::thread& other : others) other.join();
  });
  static const char* const blocking = std::getenv("CUDA_LAUNCH_BLOCKING");
  if (blocking && std::atoi(blocking) != 0 && !isCapturing(streamOf(stream)))
    finish(streamOf(stream));
  return cudaSuccess;
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

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                void** arguments) {
  return launch(kernel, static_cast<int>(config->gridDim.x), arguments, config->stream);
}
cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3, void** arguments, size_t,
                             cudaStream_t stream) {
  return launch(kernel, static_cast<int>(grid.x), arguments, stream);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  if (const auto e = fate()) return said(e);
  *attributes = {};
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
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3, void** arguments, size_t,
                               cudaStream_t stream) {
  return launch(kernel, static_cast<int>(grid.x), arguments, stream);
}

}  // extern "C"
