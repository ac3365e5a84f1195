// Every rank gets everybody's elements, and adds them in the order of ranks: so all have the same
// bits.  What travels is the number of elements, their indices, and their values.
#include "torch/sparse.h"

#include <ATen/core/grad_mode.h>

#include <memory>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "torch/arguments.h"
#include "torch/cuda_build.h"

namespace ringreduce {
namespace {

constexpr auto kSparseCall = "sparse all_reduce";

// What ranks must agree on, or one would read and write beside another's elements.
uint64_t shapeOf(const at::Tensor& tensor) {
  uint64_t hash = mixed(0, static_cast<uint64_t>(tensor.sparse_dim()));
  for (int64_t size : tensor.sizes()) hash = mixed(hash, static_cast<uint64_t>(size));
  return hash;
}

at::Tensor packed(const at::Tensor& tensor) {
  const at::Tensor indices = tensor._indices().contiguous(), values = tensor._values().contiguous();
  const int64_t elements = indices.size(1);
  at::Tensor bytes = at::empty(
      {static_cast<int64_t>(sizeof elements + indices.nbytes() + values.nbytes())}, at::kByte);
  auto* at = bytes.data_ptr<uint8_t>();
  copyBytes(at, &elements, sizeof elements);
  copyBytes(at + sizeof elements, indices.data_ptr(), indices.nbytes());
  copyBytes(at + sizeof elements + indices.nbytes(), values.data_ptr(), values.nbytes());
  return bytes;
}

// Another rank's elements, in a tensor like `own`.
at::Tensor unpacked(const at::Tensor& bytes, const at::Tensor& own) {
  int64_t elements = 0;
  const auto* at = bytes.data_ptr<uint8_t>();
  copyBytes(&elements, at, sizeof elements);
  at::Tensor indices = at::empty({own.sparse_dim(), elements}, at::kLong);
  std::vector<int64_t> shape = own._values().sizes().vec();
  shape[0] = elements;
  at::Tensor values = at::empty(shape, own._values().options());
  copyBytes(indices.data_ptr(), at + sizeof elements, indices.nbytes());
  copyBytes(values.data_ptr(), at + sizeof elements + indices.nbytes(), values.nbytes());
  return at::_sparse_coo_tensor_unsafe(indices, values, own.sizes());
}

// The sum in a wider dtype where the own one would round at every addition.
at::Tensor sumOf(const std::vector<at::Tensor>& parts, const at::Tensor& own, ReduceOp op) {
  const auto dtype = own.scalar_type();
  const bool half = dtype == at::kHalf || dtype == at::kBFloat16;
  std::vector<at::Tensor> indices, values;
  for (const at::Tensor& part : parts) {
    indices.push_back(part._indices());
    values.push_back(half ? part._values().to(at::kFloat) : part._values());
  }
  at::Tensor sum =
      at::_sparse_coo_tensor_unsafe(at::cat(indices, 1), at::cat(values, 0), own.sizes())
          .coalesce();
  at::Tensor result = sum._values();
  if (op == ReduceOp::kAvg) result = result.div(static_cast<double>(parts.size()));
  return at::_sparse_coo_tensor_unsafe(sum._indices(), result.to(dtype), own.sizes())
      ._coalesced_(true);
}

}  // namespace

Operation sparseAllReduce(const at::Tensor& tensor, const c10d::AllreduceOptions& options) {
  if (!tensor.defined() || tensor.layout() != at::kSparse)
    refuse(kSparseCall, "takes sparse tensors in COO layout");
  requireCpu(tensor, kSparseCall);
  const ReduceOp op = opOf(options.reduceOp, kSparseCall);
  const DType dtype = dtypeOf(tensor, kSparseCall);
  if (op != ReduceOp::kSum && !(op == ReduceOp::kAvg && isFloating(dtype)))
    refuse(kSparseCall, std::string("cannot take ") + name(op) + " of " + name(dtype) +
                            " elements; it adds, and averages floating-point ones");
  const at::NoGradGuard no_grad;
  const at::Tensor own = tensor.detach().coalesce();
  const at::Tensor bytes = packed(own);
  const auto received = std::make_shared<std::vector<at::Tensor>>();
  const auto place = [received](const std::vector<size_t>& counts) {
    std::vector<void*> outputs;
    for (size_t count : counts) {
      received->push_back(at::empty({static_cast<int64_t>(count)}, at::kByte));
      outputs.push_back(received->back().data_ptr());
    }
    return outputs;
  };
  const auto add = [received, own, bytes, tensor, op] {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> parts;
    for (const at::Tensor& bytes : *received) parts.push_back(unpacked(bytes, own));
    tensor.copy_(sumOf(parts, own, op));  // not of detach(), whose elements are its own
  };
  Operation operation{.call = Barrier{}, .timeout = timeoutOf(options.timeout), .after = add};
  auto& reduce = operation.call.emplace<SparseAllReduce>();
  reduce.count = static_cast<size_t>(tensor.numel());
  reduce.dtype = dtype;
  reduce.op = op;
  reduce.shape = shapeOf(tensor);
  reduce.gather.input = bytes.data_ptr();
  reduce.gather.count = static_cast<size_t>(bytes.numel());
  reduce.gather.dtype = DType::kUInt8;
  reduce.gather.place = place;
  return operation;
}

}  // namespace ringreduce
