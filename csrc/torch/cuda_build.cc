#include "torch/cuda_build.h"

#include "base/error.h"

#ifdef RINGREDUCE_CUDA
#include "cuda/gpu_device.h"
#endif

namespace ringreduce {

std::string cudaBuild() {
#ifdef RINGREDUCE_CUDA
  return cuda::buildInfo().text();
#else
  return "";
#endif
}

void requireCpu(const at::Tensor& tensor, const char* call) {
  if (tensor.device().is_cpu()) return;
  std::string why = "takes tensors in CPU memory, not on " + tensor.device().str();
  if (tensor.is_cuda())
    why +=
        hasCuda()
            ? ", where the call's other tensors are not"
            : ": this ringreduce was built without CUDA; use nccl for CUDA tensors "
              "(\"cpu:ringreduce,cuda:nccl\"), or rebuild it with nvcc in PATH and a CUDA build of "
              "torch";
  throw Error(Failure::kArgument, std::string("ringreduce ") + call + ": " + why);
}

}  // namespace ringreduce
