// Memory that this process's kernels on one GPU reach, and how each kind of it is given back.
//
// It may be called from any thread, but not from a forked child, where the destructors do nothing.
// No kernel may use memory when it is given back: the launching code waits for its kernels first.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/fd.h"
#include "group/exchange_fds.h"
#include "transport/shm/segment.h"

namespace ringreduce::cuda {

class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  std::byte* data() const { return data_; }  // for kernels
  size_t bytes() const { return bytes_; }
  int device() const { return device_; }

 protected:
  DeviceMemory(int device, size_t bytes) : device_(device), bytes_(bytes) {}
  // Whether CUDA can be called: not in a child that was forked since.
  bool isOurs() const { return forkGeneration() == generation_; }

  const int device_;
  const size_t bytes_;
  const int generation_ = forkGeneration();
  std::byte* data_ = nullptr;
};
using MemoryPtr = std::shared_ptr<DeviceMemory>;

// Plain memory of a GPU (cudaMalloc).  Whole blocks of 2 MiB, the driver's own unit: other
// processes that map it must not see memory beside it.
inline constexpr size_t kBlockBytes = 2 << 20;
MemoryPtr allocate(int device, size_t bytes);

// Memory of a GPU that other processes map by a descriptor (CUDA's virtual memory management).  It
// lives while any process maps it or holds a descriptor, even after its maker has ended.  `bytes`
// is a multiple of exportGranularity(device).
struct Exported {
  MemoryPtr memory;
  Fd fd;
};
size_t exportGranularity(int device);
Exported allocateExported(int device, size_t bytes);
// Maps such memory, of any GPU, for kernels on `device`: the pieces side by side, from an address
// on that is a multiple of `alignment`, if that is not 0.
struct ExportedPiece {
  Fd fd;
  size_t bytes;
};
MemoryPtr mapExported(int device, std::span<const ExportedPiece> pieces, size_t alignment = 0);

// Exports the piece that this process has mapped at `at`; any allocator may have mapped it.  The
// addresses from `first` to `last` hold whole pieces, without a gap.  Throws CudaError if the piece
// cannot be exported.
struct PieceInPlace {
  const std::byte* begin;
  ExportedPiece piece;
};
PieceInPlace exportMapped(int device, const std::byte* at, const std::byte* first,
                          const std::byte* last);

// Addresses for kernels on `device`, to which pieces are mapped one by one.
class ReservedAddresses : public DeviceMemory {
 public:
  using DeviceMemory::DeviceMemory;
  // Where nothing is mapped yet.  Throws CudaError; nothing is mapped then.
  virtual void map(size_t offset, const ExportedPiece& piece) = 0;
  virtual void unmap(size_t offset) = 0;  // the piece that was mapped there
};
std::shared_ptr<ReservedAddresses> reserveAddresses(int device, size_t bytes);

// Opens an allocation of another process by its legacy IPC handle, for kernels on `device`.  That
// process must not free it before this is gone.
MemoryPtr openIpc(int device, const cudaIpcMemHandle_t& handle, size_t bytes);
cudaIpcMemHandle_t ipcHandleOf(int device, void* base);

// Lets kernels on `device` use plain memory of GPU `peer` of the same process, until the process
// ends.
void enablePeerAccess(int device, int peer);

// Pins a segment of host memory and lets kernels on `device` use it.  The segment may be registered
// many times, for several GPUs and by ranks that are threads.
MemoryPtr registerSegment(int device, std::shared_ptr<Segment> segment);

// A copy that does not end, as where GPUs do not reach each other although they say so.  The
// process cannot use CUDA any more: what would give something back would wait for the copy, so all
// is left until the process ends.
struct CopyHangs : Error {
  using Error::Error;
};
// Whether there is one in this process, or in the one that it was forked from.
bool copiesHang();

// A stream that does not wait for others.
class Stream {
 public:
  static constexpr Nanos kPatience = 30 * kSecond;
  explicit Stream(int device, Nanos patience = kPatience);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Both return when they are done, or throw CopyHangs after `patience`.  Memory may be any that
  // `device` reaches, or of the host.  CUDA itself waits, without end, for a copy from a GPU to
  // the host's pageable memory, so no peer's memory may be copied there.
  void copy(void* to, const void* from, size_t bytes);
  void zero(void* data, size_t bytes);
  // Copies, and returns the bytes a second by the GPU's clock.
  double rateOfCopy(void* to, const void* from, size_t bytes);
  cudaStream_t get() const { return stream_; }

 private:
  void await(const char* tried);

  const int device_;
  const Nanos patience_;
  const int generation_ = forkGeneration();
  cudaStream_t stream_ = nullptr;
};

// Host memory that all ranks of a group map and all their GPUs reach, a piece for each rank: for
// flags that a host must be able to write without a call of CUDA.  It outlives a rank that dies
// (group/exchange_fds.h).
class MappedPages {
 public:
  // Collective, with the same `bytes` on all ranks: that much for each, zeroed, rounded up to whole
  // pages.  `device` is this rank's.  Throws the same Error on all ranks.
  MappedPages(Group& group, int device, size_t bytes);

  size_t bytes() const { return pages_.bytes(); }
  std::byte* onHost(int rank) const { return pages_.at(rank); }
  // For this rank's GPU; another address than on the host on some machines.
  std::byte* onDevice(int rank) const { return mapped_[static_cast<size_t>(rank)]->data(); }

 private:
  HostPages pages_;
  std::vector<MemoryPtr> mapped_;  // by rank
};

}  // namespace ringreduce::cuda
