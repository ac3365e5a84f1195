// Memory for tensors that are communicated often.
#pragma once

#include <c10/core/Allocator.h>

#include <memory>

namespace ringreduce {

// Gives whole pages, huge ones where the system has them, so that a pass over a large bucket costs
// few address translations.  What it gives outlives every group.
class PageAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override;
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

std::shared_ptr<PageAllocator> pageAllocator();

}  // namespace ringreduce
