// The memory of tensors while an operation uses it, whatever the program does to the tensors
// meanwhile: set_() and an assignment to .data give a tensor another storage, resize_() gives the
// storage other memory.  The results then go to the memory that the tensor had.
//
// Memory that the storage's own allocator did not make, such as that of share_memory_(), is not
// held through a resize.
#pragma once

#include <ATen/ATen.h>

#include <initializer_list>
#include <mutex>
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
  std::mutex mutex_;
  std::vector<c10::Storage> storages_;
  std::vector<void*> blocks_;  // that their storages' allocators have made
};

}  // namespace ringreduce
