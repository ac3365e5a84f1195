// A storage that is resized frees its memory by the deleter that stands beside it.  So the deleter
// of a storage that an operation uses is replaced, once, by one that waits for the operation.  It
// is not put back, because another thread may use the storage when the operation ends.
#include "torch/held_memory.h"

#include <pthread.h>

#include <mutex>
#include <unordered_map>

namespace ringreduce {
namespace {

struct Block {
  c10::DeleterFnPtr free;
  size_t uses = 0;
  bool is_freed = false;  // by its storage
};

struct Blocks {
  std::mutex mutex;
  std::unordered_map<void*, Block> by_context;  // of the DataPtr
};

// Never destroyed: tensors are freed while the process exits.
Blocks& blocks() {
  static auto* const all = [] {
    // A forked child frees tensors too.
    pthread_atfork([] { blocks().mutex.lock(); }, [] { blocks().mutex.unlock(); },
                   [] { blocks().mutex.unlock(); });
    return new Blocks;
  }();
  return *all;
}

void freeUnlessUsed(void* context) {
  c10::DeleterFnPtr free = nullptr;
  {
    const std::lock_guard lock(blocks().mutex);
    const auto found = blocks().by_context.find(context);
    if (found->second.uses > 0) {
      found->second.is_freed = true;
      return;
    }
    free = found->second.free;
    blocks().by_context.erase(found);
  }
  free(context);
}

}  // namespace

HeldMemory::HeldMemory(std::initializer_list<const std::vector<at::Tensor>*> lists) {
  const std::lock_guard lock(blocks().mutex);
  for (const auto* list : lists)
    for (const at::Tensor& tensor : *list) {
      if (!tensor.defined() || !tensor.is_cpu() || !tensor.has_storage()) continue;
      c10::StorageImpl& storage = *storages_.emplace_back(tensor.storage()).unsafeGetStorageImpl();
      c10::DataPtr& data = storage._mutable_data_ptr_no_checks();
      const c10::DeleterFnPtr free = data.get_deleter();
      if (!storage.resizable() || !data.get_context()) continue;
      if (free != &freeUnlessUsed) {
        // Other memory may be recognized by its deleter, as shared memory is by torch.
        if (!storage.allocator() || free != storage.allocator()->raw_deleter()) continue;
        if (!data.compare_exchange_deleter(free, &freeUnlessUsed)) continue;
        blocks().by_context[data.get_context()] = {free};
      }
      ++blocks().by_context.at(data.get_context()).uses;
      blocks_.push_back(data.get_context());
    }
}

void HeldMemory::release() {
  if (released_.exchange(true)) return;
  Few<std::pair<c10::DeleterFnPtr, void*>> unused;
  if (!blocks_.empty()) {
    const std::lock_guard lock(blocks().mutex);
    for (void* context : blocks_) {
      const auto found = blocks().by_context.find(context);
      if (--found->second.uses > 0 || !found->second.is_freed) continue;
      unused.emplace_back(found->second.free, context);
      blocks().by_context.erase(found);
    }
  }
  for (const auto& [free, context] : unused) free(context);
  storages_.clear();
}

}  // namespace ringreduce
