// torch.ops.ringreduce: collectives as operators of torch, for programs to which the Python part of
// torch.distributed costs too much, and for compiled ones.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <array>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "torch/backend.h"

namespace ringreduce {
namespace {

// The names of torch's functional collectives.
c10d::ReduceOp::RedOpType opNamed(std::string_view name) {
  using Op = c10d::ReduceOp;
  static constexpr std::array<std::pair<std::string_view, Op::RedOpType>, 8> kOps{{
      {"sum", Op::SUM},
      {"avg", Op::AVG},
      {"product", Op::PRODUCT},
      {"min", Op::MIN},
      {"max", Op::MAX},
      {"band", Op::BAND},
      {"bor", Op::BOR},
      {"bxor", Op::BXOR},
  }};
  for (const auto& [known, op] : kOps)
    if (name == known) return op;
  TORCH_CHECK_VALUE(false, "torch.ops.ringreduce.all_reduce_ knows sum, avg, product, min, max, ",
                    "band, bor and bxor, not '", name, "'");
}

void runAllReduce(const at::Tensor& tensor, const std::string& op, const std::string& group_name) {
  const auto group = c10d::resolve_process_group(group_name);
  const auto backend = group->getBackend(tensor.device().type());
  c10d::AllreduceOptions options;
  options.reduceOp = opNamed(op);
  options.asyncOp = false;
  // Autograd refuses a backward pass that needs the tensor as it was.
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  if (auto* const ours = dynamic_cast<Backend*>(backend.get()))
    return ours->runAllReduce(tensor, options);
  // With TORCH_DISTRIBUTED_DEBUG=DETAIL torch's wrapper is around the backend, and has its name.
  TORCH_CHECK(backend->getBackendName() == "ringreduce",
              "torch.ops.ringreduce.all_reduce_ needs a ringreduce group, not one of ",
              backend->getBackendName());
  std::vector<at::Tensor> tensors{tensor};
  backend->allreduce(tensors, options)->wait();
}

void onMeta(const at::Tensor&, const std::string&, const std::string&) {}

}  // namespace

// Changes the tensor in place, when it returns, or in its stream; waits as the blocking all_reduce.
TORCH_LIBRARY(ringreduce, m) {
  m.def("all_reduce_(Tensor(a!) tensor, str op, str group_name) -> ()");
  m.impl("all_reduce_", torch::dispatch(c10::DispatchKey::CPU, TORCH_FN(runAllReduce)));
  m.impl("all_reduce_", torch::dispatch(c10::DispatchKey::CUDA, TORCH_FN(runAllReduce)));
  m.impl("all_reduce_", torch::dispatch(c10::DispatchKey::Meta, TORCH_FN(onMeta)));
}

}  // namespace ringreduce
