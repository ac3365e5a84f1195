// Memory from mmap, and tensors around memory.
#include "torch/page_memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "base/bytes.h"
#include "transport/shm/shared_block.h"

namespace ringreduce {
namespace {

constexpr size_t kPage = 4 << 10, kHugePage = 2 << 20;

struct Mapping {
  void* data;
  size_t bytes;
};

void unmap(void* context) {
  auto* mapping = static_cast<Mapping*>(context);
  munmap(mapping->data, mapping->bytes);
  delete mapping;
}

size_t bytesOf(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return static_cast<size_t>(c10::multiply_integers(sizes)) * options.dtype().itemsize();
}

at::Tensor tensorIn(c10::DataPtr memory, at::IntArrayRef sizes, const at::TensorOptions& options) {
  const c10::Storage storage(c10::Storage::use_byte_size_t(), bytesOf(sizes, options),
                             std::move(memory), c10::GetAllocator(c10::DeviceType::CPU),
                             /*resizable=*/true);
  const at::Tensor tensor = at::empty({0}, options);
  return tensor.set_(storage, 0, sizes, c10::contiguous_strides(sizes));
}

// `drop` gets the block's owner, a std::shared_ptr<SharedBlock>*.
at::Tensor tensorIn(std::shared_ptr<SharedBlock> block, at::IntArrayRef sizes,
                    const at::TensorOptions& options, c10::DeleterFnPtr drop) {
  std::byte* const data = block->data();
  return tensorIn(c10::DataPtr(data, new std::shared_ptr<SharedBlock>(std::move(block)), drop,
                               c10::DeviceType::CPU),
                  sizes, options);
}

}  // namespace

c10::DataPtr PageAllocator::allocate(size_t bytes) {
  if (bytes == 0) return {nullptr, c10::DeviceType::CPU};
  const bool huge = bytes >= kHugePage;
  auto mapping =
      std::make_unique<Mapping>(Mapping{nullptr, roundUp(bytes, huge ? kHugePage : kPage)});
  mapping->data =
      mmap(nullptr, mapping->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK_WITH(OutOfMemoryError, mapping->data != MAP_FAILED, "ringreduce cannot map ",
                   mapping->bytes, " bytes of memory: ", std::strerror(errno));
  if (huge) madvise(mapping->data, mapping->bytes, MADV_HUGEPAGE);  // a wish
  void* data = mapping->data;
  return {data, mapping.release(), &unmap, c10::DeviceType::CPU};
}

std::shared_ptr<PageAllocator> pageAllocator() {
  static auto* allocator =
      new std::shared_ptr<PageAllocator>(new PageAllocator);  // never destroyed
  return *allocator;
}

at::Tensor pageTensor(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return tensorIn(pageAllocator()->allocate(bytesOf(sizes, options)), sizes, options);
}

at::Tensor sharedTensor(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return tensorIn(SharedBlock::create(bytesOf(sizes, options)), sizes, options, [](void* context) {
    delete static_cast<std::shared_ptr<SharedBlock>*>(context);
  });
}

at::Tensor reusedTensor(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return tensorIn(SharedBlock::reuse(bytesOf(sizes, options)), sizes, options, [](void* context) {
    const std::unique_ptr<std::shared_ptr<SharedBlock>> block(
        static_cast<std::shared_ptr<SharedBlock>*>(context));
    SharedBlock::keep(std::move(*block));
  });
}

}  // namespace ringreduce
