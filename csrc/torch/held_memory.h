// The memory of tensors while an operation uses it, whatever the program does to the tensors
// meanwhile: set_() and an assignment to .data give a tensor another storage, resize_() gives the
// storage other memory.  The results then go to the memory that the tensor had.
//
// Memory that the storage's own allocator did not make, such as that of share_memory_(), is not
// held through a resize.
#pragma once

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <initializer_list>
#include <vector>

namespace ringreduce {

class HeldMemory {
 public:
  // Of tensors on the CPU; of a GPU's, the allocator knows the stream.
  explicit HeldMemory(std::initializer_list<const std::vector<at::Tensor>*> lists);
  ~HeldMemory() { release(); }
  HeldMemory(const HeldMemory&) = delete;
  HeldMemory& operator=(const HeldMemory&) = delete;

  // The operation has ended.
  void release();

 private:
  // Most calls have one tensor, and small messages are made many times a millisecond.
  template <class T>
  using Few = c10::SmallVector<T, 2>;

  std::atomic<bool> released_{false};
  Few<c10::Storage> storages_;
  Few<void*> blocks_;  // that their storages' allocators have made
};

}  // namespace ringreduce
