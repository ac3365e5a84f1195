// CUDA's errors in our words, and what is known of GPUs.  Runs on machines without a GPU or a
// driver too: that this library loads there, and says what is missing, is a part of it.
#include <set>

#include "check.h"
#include "cuda/cuda_errors.h"
#include "cuda/gpu_device.h"
#include "ranks.h"

using namespace ringreduce;
using namespace ringreduce::cuda;
using ranks::failureOf;

// The numbers that cuda_errors.cc and docs/gpu.md have.
static_assert(cudaErrorECCUncorrectable == 214 && cudaErrorNvlinkUncorrectable == 220 &&
              cudaErrorIllegalAddress == 700 && cudaErrorLaunchTimeout == 702 &&
              cudaErrorAssert == 710 && cudaErrorHardwareStackError == 714 &&
              cudaErrorIllegalInstruction == 715 && cudaErrorMisalignedAddress == 716 &&
              cudaErrorInvalidAddressSpace == 717 && cudaErrorInvalidPc == 718 &&
              cudaErrorLaunchFailure == 719 && cudaErrorMpsClientTerminated == 810 &&
              cudaErrorExternalDevice == 911);
static_assert(static_cast<int>(CUDA_ERROR_ILLEGAL_ADDRESS) == cudaErrorIllegalAddress &&
              static_cast<int>(CUDA_ERROR_MPS_CLIENT_TERMINATED) == cudaErrorMpsClientTerminated &&
              static_cast<int>(CUDA_ERROR_OUT_OF_MEMORY) == cudaErrorMemoryAllocation &&
              static_cast<int>(CUDA_ERROR_DEINITIALIZED) == cudaErrorCudartUnloading);

namespace {

bool says(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

bool hasDriver() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess && version > 0;
}

}  // namespace

TEST(without_a_driver_it_says_so) {
  if (hasDriver()) {
    std::printf("skipped: there is a driver\n");
    return;
  }
  CHECK_EQ(deviceCount(), 0);
  for (int again = 0; again < 2; ++again) {
    CHECK(failureOf([] { driver(); }, "This machine has no NVIDIA driver") == Failure::kSetup);
    CHECK(failureOf([] { describeDevice(0); }, "cannot count the GPUs: ") == Failure::kSetup);
    CHECK(failureOf([] { OnDevice here(0); }, "or keep to CPU tensors") == Failure::kSetup);
  }
}

TEST(an_error_says_what_was_tried_where_and_what_to_do) {
  cuda::check(cudaSuccess, "do anything");
  try {
    cuda::check(cudaErrorMemoryAllocation, "allocate 5 MiB", 3);
    CHECK(false);
  } catch (const CudaError& error) {
    CHECK(error.kind() == Failure::kSetup);
    CHECK(error.is(cudaErrorMemoryAllocation) && !error.ruinsProcess());
    CHECK(std::string(error.what())
              .starts_with("cannot allocate 5 MiB on GPU 3: cudaErrorMemoryAllocation (out of "
                           "memory). Free GPU"));
  }
  try {
    cuda::check(cudaErrorIllegalAddress, "run a kernel", kNoDevice, Failure::kAborted);
    CHECK(false);
  } catch (const CudaError& error) {
    CHECK(error.kind() == Failure::kAborted);
    CHECK(error.ruinsProcess());
    CHECK(says(error.what(), "cannot run a kernel: cudaErrorIllegalAddress (an illegal memory"));
    CHECK(says(error.what(), "end it and start it again"));
  }
}

TEST(errors_that_ruin_a_process) {
  // Those of which CUDA's own header says it, and two of lost data.
  const std::set<int> ruins{214, 220, 226, 700, 702, 710, 714, 715,
                            716, 717, 718, 719, 721, 810, 911};
  for (int code = 0; code < 1000; ++code) {
    CHECK_EQ(ruinsProcess(static_cast<cudaError_t>(code)), ruins.contains(code));
    CHECK_EQ(ruinsProcess(static_cast<CUresult>(code)), ruins.contains(code));
  }
}

TEST(errors_of_the_driver_have_its_names) {
  if (!hasDriver()) {
    std::printf("skipped: no driver\n");
    return;
  }
  try {
    cuda::check(CUDA_ERROR_NOT_PERMITTED, "do that", 1);
    CHECK(false);
  } catch (const CudaError& error) {
    CHECK(says(error.what(), "cannot do that on GPU 1: CUDA_ERROR_NOT_PERMITTED ("));
  }
  CHECK(says(describe(static_cast<CUresult>(123456), "do that", 1), "CUDA error 123456"));
}
