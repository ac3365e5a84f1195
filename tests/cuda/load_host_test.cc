// That a program with the GPU data plane in it starts where there is no driver (it links libcuda
// nowhere), and what it says it was built for.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>

#include "check.h"
#include "cuda/gpu_device.h"

using ringreduce::cuda::BuildInfo;
using ringreduce::cuda::buildInfo;

TEST(build_info_is_that_of_the_build) {
  const BuildInfo info = buildInfo();
  CHECK(info.toolkit >= 12000);
  CHECK(!info.architectures.empty());
  CHECK(std::is_sorted(info.architectures.begin(), info.architectures.end()));
  // The GPUs that CMake asked nvcc for, and those that nvcc reports.
  CHECK_EQ(info.text(), std::string(RINGREDUCE_CUDA_TEXT));
  std::printf("CUDA %s\n", info.text().c_str());
}

TEST(no_driver_is_an_error_and_no_more) {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  std::printf("%d GPUs: %s\n", devices, cudaGetErrorString(error));
  CHECK(error == cudaSuccess ? devices > 0 : devices == 0);
}
