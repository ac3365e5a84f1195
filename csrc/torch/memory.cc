// mmap, behind torch's interface.
#include "torch/memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "base/bytes.h"

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

}  // namespace ringreduce
