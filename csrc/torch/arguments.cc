// Conversions and checks that several calls share.
#include "torch/arguments.h"

#include <torch/headeronly/version.h>

#include "base/error.h"

namespace ringreduce {

Nanos nanosOf(std::chrono::milliseconds time) {
  return time.count() < kNever / kMillisecond ? time.count() * kMillisecond : kNever;
}

Nanos timeoutOf(std::chrono::milliseconds timeout) {
  return timeout.count() > 0 ? nanosOf(timeout) : 0;  // kUnsetTimeout: the group's
}

ReduceOp opOf(const c10d::ReduceOp& op, const char* call) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
      return ReduceOp::kSum;
    case c10d::ReduceOp::AVG:
      return ReduceOp::kAvg;
    case c10d::ReduceOp::PRODUCT:
      return ReduceOp::kProduct;
    case c10d::ReduceOp::MIN:
      return ReduceOp::kMin;
    case c10d::ReduceOp::MAX:
      return ReduceOp::kMax;
    case c10d::ReduceOp::BAND:
      return ReduceOp::kBand;
    case c10d::ReduceOp::BOR:
      return ReduceOp::kBor;
    case c10d::ReduceOp::BXOR:
      return ReduceOp::kBxor;
    case c10d::ReduceOp::PREMUL_SUM:
      return ReduceOp::kPremulSum;
    default:
      refuse(call, "an unknown reduce op");
  }
}

namespace {

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13
using PremulSum = c10d::NCCLPreMulSumSupplement;
#else
using PremulSum = c10d::PreMulSumSupplement;
#endif

}  // namespace

Factor factorOf(const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return {};
  const auto* supplement = dynamic_cast<const PremulSum*>(op.supplement_.get());
  if (!supplement) throw Error(Failure::kArgument, "ringreduce: PREMUL_SUM without its factor");
  return {supplement->double_factor, supplement->tensor_factor};
}

double numberOf(const Factor& factor) {
  return factor.tensor.defined() ? factor.tensor.item<double>() : factor.number;
}

at::Tensor addable(const at::Tensor& tensor, ReduceOp op, const char* call) {
  if (!tensor.is_complex()) return tensor;
  if (op != ReduceOp::kSum && op != ReduceOp::kAvg && op != ReduceOp::kPremulSum)
    refuse(call, std::string("cannot take ") + name(op) + " of complex numbers");
  if (tensor.is_conj())
    refuse(call, "takes no lazily conjugated tensor; pass tensor.resolve_conj()");
  return at::view_as_real(tensor);
}

void requireLike(const at::Tensor& tensor, int64_t elements, const at::Tensor& like,
                 const char* call, const char* what) {
  requireDense(tensor, call, like.device());
  if (tensor.numel() != elements || tensor.scalar_type() != like.scalar_type())
    refuse(call, c10::str(what, " must have ", elements, " elements of ", like.scalar_type(),
                          "; it has ", tensor.numel(), " of ", tensor.scalar_type()));
}

const Tensors& onlyList(const std::vector<Tensors>& lists, size_t size, const char* call,
                        const char* what) {
  if (lists.size() != 1 || lists[0].size() != size)
    refuse(call, c10::str("needs a list of ", size, " ", what, " tensors, one for each rank",
                          lists.size() == 1 ? c10::str(", not of ", lists[0].size()) : ""));
  return lists[0];
}

void requireSome(const Tensors& tensors, const char* call) {
  if (tensors.empty()) refuse(call, "an empty list of tensors");
}

void requirePairs(const Tensors& outputs, const Tensors& inputs, const char* call) {
  requireSome(inputs, call);
  if (outputs.size() != inputs.size())
    refuse(call, c10::str(outputs.size(), " outputs for ", inputs.size(), " inputs"));
}

}  // namespace ringreduce
