// Asks the CUDA runtime for the driver's functions.
#include "cuda/driver.h"

#include <cuda_runtime_api.h>

#include <string>

#include "cuda/errors.h"

namespace ringreduce::cuda {
namespace {

void* find(const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult answer = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &answer);
#else
  // The newest interface that this runtime knows, which is the one of `version`.
  (void)version;
  const cudaError_t error = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &answer);
#endif
  check(error, "find the CUDA driver's functions", kNoDevice);
  if (answer == cudaDriverEntryPointSuccess && function) return function;
  int has = 0;
  check(cudaDriverGetVersion(&has), "ask for the CUDA driver's version", kNoDevice);
  throw CudaError(Failure::kSetup, cudaErrorCallRequiresNewerDriver,
                  std::string("the CUDA driver has no ") + name + "; it is for CUDA " +
                      std::to_string(has / 1000) + "." + std::to_string(has % 1000 / 10) +
                      ": install a newer one (nvidia-smi shows it)");
}

Driver findAll() {
  Driver d{};
#define RINGREDUCE_FIND(member, function, version) \
  d.member = reinterpret_cast<decltype(d.member)>(find(#function, version));
  RINGREDUCE_DRIVER_FUNCTIONS(RINGREDUCE_FIND)
#undef RINGREDUCE_FIND
  return d;
}

}  // namespace

const Driver& driver() {
  static const Driver all = findAll();  // one that throws is tried again at the next call
  return all;
}

}  // namespace ringreduce::cuda
