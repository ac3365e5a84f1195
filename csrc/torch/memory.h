// Memory for tensors that are communicated often.
#pragma once

#include <c10/core/Allocator.h>

#include <memory>

namespace ringreduce {

// Gives whole pages, huge ones where the system has them, so that a pass over a large bucket costs
// few address translations.  What it gives outlives every group.
std::shared_ptr<c10::Allocator> pageAllocator();

}  // namespace ringreduce
