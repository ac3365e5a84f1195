// Checks of tensors, and contiguous copies of those that need one.
#include "torch/tensors.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/grad_mode.h>

#include <string>

#include "base/error.h"
#include "torch/cuda_build.h"

namespace ringreduce {

void refuse(const char* call, const std::string& why) {
  throw Error(Failure::kArgument, std::string("ringreduce ") + call + ": " + why);
}

DType dtypeOf(const at::Tensor& tensor, const char* call) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kDouble:
      return DType::kFloat64;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kChar:
      return DType::kInt8;
    case at::kByte:
      return DType::kUInt8;
    case at::kShort:
      return DType::kInt16;
    case at::kInt:
      return DType::kInt32;
    case at::kLong:
      return DType::kInt64;
    case at::kBool:
      return DType::kBool;
    case at::kUInt16:
      return DType::kUInt16;
    case at::kUInt32:
      return DType::kUInt32;
    case at::kUInt64:
      return DType::kUInt64;
    case at::kComplexFloat:
      return DType::kComplex64;
    case at::kComplexDouble:
      return DType::kComplex128;
    case at::kFloat8_e4m3fn:
      return DType::kFloat8E4M3FN;
    case at::kFloat8_e5m2:
      return DType::kFloat8E5M2;
    case at::kFloat8_e4m3fnuz:
      return DType::kFloat8E4M3FNUZ;
    case at::kFloat8_e5m2fnuz:
      return DType::kFloat8E5M2FNUZ;
    case at::kFloat8_e8m0fnu:
      return DType::kFloat8E8M0FNU;
    case at::kFloat4_e2m1fn_x2:
      return DType::kFloat4E2M1FNx2;
    case at::kComplexHalf:
      return DType::kComplex32;
    default:
      refuse(call, std::string("no such elements: ") + c10::toString(tensor.scalar_type()));
  }
}

void requireDense(const at::Tensor& tensor, const char* call, c10::Device device) {
  if (!tensor.defined()) refuse(call, "an undefined tensor");
  if (tensor.layout() != at::kStrided)
    refuse(call, std::string("takes dense tensors, not ") +
                     (tensor.is_sparse() ? "sparse" : c10::str(tensor.layout())) +
                     " ones; all_reduce alone takes sparse tensors, in COO layout");
  if (tensor.is_quantized()) refuse(call, "takes no quantized tensors; dequantize them first");
  if (tensor.device() == device) return;
  if (device.is_cpu()) requireCpu(tensor, call);
  refuse(call, "takes tensors on one device, not on " + device.str() + " and on " +
                   tensor.device().str());
}

const at::Tensor& onlyOne(const std::vector<at::Tensor>& tensors, const char* call,
                          c10::Device device) {
  if (tensors.size() != 1)
    refuse(call, "takes one tensor, not a list of " + std::to_string(tensors.size()));
  requireDense(tensors[0], call, device);
  return tensors[0];
}

Staged::Staged(at::Tensor tensor, Use use, const char* call)
    : tensor_(std::move(tensor)), use_(use) {
  // A lazily conjugated or negated view has other elements than its memory.
  if (tensor_.is_contiguous() && !tensor_.is_conj() && !tensor_.is_neg()) {
    memory_ = tensor_;
    return;
  }
  if (use != Use::kRead && at::has_internal_overlap(tensor_) == at::MemOverlap::Yes)
    refuse(call,
           "cannot write to a tensor whose elements share memory (an expanded one); pass "
           ".contiguous()");
  const at::NoGradGuard no_grad;
  memory_ = use == Use::kWrite
                ? at::empty(tensor_.sizes(),
                            tensor_.options().memory_format(at::MemoryFormat::Contiguous))
                : tensor_.detach().resolve_conj().resolve_neg().contiguous();
}

void Staged::giveBack() const {
  if (use_ == Use::kRead || memory_.is_same(tensor_)) return;
  const at::NoGradGuard no_grad;
  tensor_.detach().copy_(memory_);
}

}  // namespace ringreduce
