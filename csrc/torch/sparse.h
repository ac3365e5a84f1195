// All-reduce of sparse tensors.
#pragma once

#include <ATen/ATen.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "group/operation.h"

namespace ringreduce {

// The sum (or average) of a COO tensor over all ranks, in place.  Ranks may differ in their number
// of non-zero elements; shapes, sparse dimensions and dtype must agree.
Operation sparseAllReduce(const at::Tensor& tensor, const c10d::AllreduceOptions& options);

}  // namespace ringreduce
