// Copies, and the host's memory that a GPU knows.
#include <sys/mman.h>

#include <cstring>
#include <vector>

#include "../fake_world.h"
#include "streams.h"

using namespace fake;

namespace {

// Memory of cudaHostAlloc, by address; guarded by the world's mutex.
std::map<char*, size_t>& pinned() {
  static auto* all = new std::map<char*, size_t>;
  return *all;
}

bool contains(const std::map<char*, size_t>& ranges, const void* pointer) {
  auto* p = static_cast<char*>(const_cast<void*>(pointer));
  auto found = ranges.upper_bound(p);
  if (found == ranges.begin()) return false;
  --found;
  return p < found->first + found->second;
}

enum class Where { kGpu, kPinned, kElsewhere };

// Stops at memory of a GPU that the stream cannot reach.  Copies, unlike kernels, reach the plain
// memory of all GPUs.
Where find(const void* pointer, size_t bytes, int ordinal) {
  World& w = world();
  const std::lock_guard lock(w.mutex);
  char* base = nullptr;
  if (!w.find(pointer))
    return contains(pinned(), pointer) || contains(w.registered, pointer) ? Where::kPinned
                                                                          : Where::kElsewhere;
  // Mapped pieces may lie side by side.
  const auto* at = static_cast<const char*>(pointer);
  for (const char* end = at + bytes; at < end;) {
    const Range* range = w.find(at, &base);
    if (!range) undefined("a copy goes beyond the memory that it begins in");
    if (range->kind != Range::Kind::kPlain && !range->access.contains(ordinal))
      undefined("copied memory that the GPU has no access to");
    at = base + range->bytes;
  }
  return Where::kGpu;
}

// CUDA reads unpinned memory before the call returns, and has written it by then.
cudaError_t copy(void* to, const void* from, size_t bytes, CUstream_st& stream) {
  if (bytes == 0) return cudaSuccess;
  const Where source = find(from, bytes, stream.ordinal);
  const Where target = find(to, bytes, stream.ordinal);
  if (source == Where::kElsewhere && !isCapturing(stream)) {
    const auto* begin = static_cast<const char*>(from);
    const auto e = putWork(stream, [to, kept = std::vector<char>(begin, begin + bytes)] {
      std::memcpy(to, kept.data(), kept.size());
    });
    if (e) return e;
  } else if (const auto e = putWork(stream, [=] { std::memmove(to, from, bytes); })) {
    return e;
  }
  return target == Where::kElsewhere && !isCapturing(stream) ? finish(stream) : cudaSuccess;
}

cudaError_t set(void* data, int value, size_t bytes, CUstream_st& stream) {
  if (bytes == 0) return cudaSuccess;
  find(data, bytes, stream.ordinal);
  return putWork(stream, [=] { std::memset(data, value, bytes); });
}

}  // namespace

extern "C" {

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  return said(copy(to, from, bytes, streamOf(stream)));
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes,
                                cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream) {
  for (size_t row = 0; row < height; ++row)
    if (const auto e =
            copy(static_cast<char*>(to) + row * to_pitch,
                 static_cast<const char*>(from) + row * from_pitch, width, streamOf(stream)))
      return said(e);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  if (const auto e = besideCaptures()) return said(e);
  if (const auto e = copy(to, from, bytes, streamOf(nullptr))) return said(e);
  return said(finish(streamOf(nullptr)));
}
cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t stream) {
  return said(set(data, value, bytes, streamOf(stream)));
}
cudaError_t cudaMemset(void* data, int value, size_t bytes) {
  return cudaMemsetAsync(data, value, bytes, nullptr);
}

cudaError_t cudaHostAlloc(void** data, size_t bytes, unsigned) {
  if (const auto e = besideCaptures()) return said(e);
  if (const auto e = fate()) return said(e);
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return said(cudaErrorMemoryAllocation);
  const std::lock_guard lock(world().mutex);
  pinned()[static_cast<char*>(at)] = bytes;
  *data = at;
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* data) {
  if (const auto e = besideCaptures()) return said(e);
  if (const auto e = fateOfReturn()) return said(e);
  finish(gpuOf(currentOrdinal()));
  const std::lock_guard lock(world().mutex);
  const auto found = pinned().find(static_cast<char*>(data));
  if (found == pinned().end()) undefined("freed host memory that cudaHostAlloc did not give");
  munmap(data, found->second);
  pinned().erase(found);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  const std::lock_guard lock(world().mutex);
  *attributes = {};
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->device = -2;  // no GPU, as the runtime says
  attributes->hostPointer = const_cast<void*>(pointer);
  if (const Range* range = world().find(pointer)) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->hostPointer = nullptr;
    attributes->devicePointer = const_cast<void*>(pointer);
    for (int i = 0; i < count(); ++i)
      if (gpuOf(i) == range->gpu) attributes->device = i;
  } else if (contains(pinned(), pointer) || contains(world().registered, pointer)) {
    attributes->type = cudaMemoryTypeHost;
    attributes->device = currentOrdinal();
    attributes->devicePointer = const_cast<void*>(pointer);
  }
  return cudaSuccess;
}

}  // extern "C"
