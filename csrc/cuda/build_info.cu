// Compiled by nvcc because only it knows what it compiles for.
#include <cuda_runtime_api.h>

#include "cuda/build_info.h"

namespace ringreduce::cuda {

std::string BuildInfo::text() const {
  std::string text =
      std::to_string(toolkit / 1000) + "." + std::to_string(toolkit % 1000 / 10) + ",";
  for (const int architecture : architectures) text += " sm_" + std::to_string(architecture);
  return text + " and newer";
}

BuildInfo buildInfo() {
  BuildInfo info{CUDART_VERSION, {__CUDA_ARCH_LIST__}};  // 800,900: tens of ours
  for (int& architecture : info.architectures) architecture /= 10;
  return info;
}

}  // namespace ringreduce::cuda
