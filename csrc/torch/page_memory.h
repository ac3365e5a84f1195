// Tensors in memory of whole pages: this process's own, and memory that the ranks of a host share.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>

#include <memory>

namespace ringreduce {

// Gives whole pages, huge ones where the system has them, so that a pass over a large bucket costs
// few address translations.  The memory outlives every group.
class PageAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override;
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

std::shared_ptr<PageAllocator> pageAllocator();

// A tensor in memory of the PageAllocator.
at::Tensor pageTensor(at::IntArrayRef sizes, const at::TensorOptions& options);

// A tensor in memory of its own that the other ranks of this host can map (shared_block.h), zeroed.
// Throws Error(kSetup).
at::Tensor sharedTensor(at::IntArrayRef sizes, const at::TensorOptions& options);

// The same, perhaps in memory that another tensor of that size has let go: its bytes are whatever
// was there.
at::Tensor reusedTensor(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace ringreduce
