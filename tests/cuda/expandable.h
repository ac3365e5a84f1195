// GPU memory that is mapped piece by piece, for tests of boards.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "cuda/cuda_errors.h"
#include "cuda/gpu_device.h"
#include "cuda/memory/device_memory.h"
#include "cuda/memory/expandable_memory.h"

namespace peers {

using namespace ringreduce;
using namespace ringreduce::cuda;

// An allocator that maps memory piece by piece, as torch's does for an expandable segment.
class Expandable {
 public:
  static constexpr size_t kPiece = 2 * kBlockBytes;

  Expandable(int device, size_t pieces) : device_(device), handles_(pieces) {
    const OnDevice here(device_);
    cuda::check(driver().memAddressReserve(&base_, pieces * kPiece, 0, 0, 0), "reserve addresses");
  }
  ~Expandable() {
    for (size_t i = 0; i < handles_.size(); ++i)
      if (handles_[i]) unmap(i, 1);
    cuda::check(driver().memAddressFree(base_, handles_.size() * kPiece), "free addresses");
  }
  Expandable(const Expandable&) = delete;
  Expandable& operator=(const Expandable&) = delete;

  std::byte* at(size_t piece) const { return reinterpret_cast<std::byte*>(base_ + piece * kPiece); }
  void map(size_t first, size_t count, bool exportable = true) {
    const OnDevice here(device_);
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device_};
    if (exportable) properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    const CUmemAccessDesc access{.location = properties.location,
                                 .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    for (size_t i = first; i < first + count; ++i) {
      CUmemGenericAllocationHandle handle = 0;
      cuda::check(driver().memCreate(&handle, kPiece, &properties, 0), "allocate memory");
      cuda::check(driver().memMap(base_ + i * kPiece, kPiece, 0, handle, 0), "map memory");
      handles_[i] = handle;
    }
    cuda::check(driver().memSetAccess(base_ + first * kPiece, count * kPiece, &access, 1),
                "get access");
    noteMapped(device_, base_ + first * kPiece, count * kPiece);
  }
  void unmap(size_t first, size_t count) {
    const OnDevice here(device_);
    for (size_t i = first; i < first + count; ++i) {
      cuda::check(driver().memUnmap(base_ + i * kPiece, kPiece), "unmap memory");
      cuda::check(driver().memRelease(*std::exchange(handles_[i], std::nullopt)), "release memory");
    }
    noteUnmapped(base_ + first * kPiece, count * kPiece);
  }

 private:
  const int device_;
  CUdeviceptr base_ = 0;
  std::vector<std::optional<CUmemGenericAllocationHandle>> handles_;
};

}  // namespace peers
