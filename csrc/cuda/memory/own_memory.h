// GPU memory that is made to be mapped by other processes, for tensors: DDP's buckets, a MemPool.
//
// It is known to the process by its address, so that a call can tell of a tensor whether it lies in
// such memory.  Who else maps it is the business of segment_board.h.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "base/fd.h"
#include "cuda/memory/device_memory.h"

struct CUstream_st;  // cudaStream_t is a pointer to one

namespace ringreduce::cuda {

// A piece of such memory.  It stays mapped here as long as this object.
class OwnSegment {
 public:
  OwnSegment(uint64_t id, Exported made) : id_(id), made_(std::move(made)) {}
  OwnSegment(const OwnSegment&) = delete;
  OwnSegment& operator=(const OwnSegment&) = delete;

  uint64_t id() const { return id_; }  // never used twice in a process
  int device() const { return made_.memory->device(); }
  std::byte* data() const { return made_.memory->data(); }
  size_t bytes() const { return made_.memory->bytes(); }
  int fd() const { return made_.fd.get(); }

  // Whether its owner has let go of it, and the streams that used it have come past that.
  bool isOver() const { return is_over_; }
  // Runs `then` once it is over, in the thread that gives memory back, and nothing that was to run
  // before.
  void whenOver(std::function<void()> then);
  void end();

  // Never gives it back: a CUDA graph may use it at any time.
  void keep() { is_kept_ = true; }
  bool isKept() const { return is_kept_; }

 private:
  const uint64_t id_;
  const Exported made_;
  std::atomic<bool> is_over_ = false, is_kept_ = false;
  std::mutex mutex_;
  std::function<void()> then_;
};

// The streams in which the memory may be in use; asked when its last owner lets go of it.
using StreamUsers = std::function<std::vector<CUstream_st*>()>;

// Memory of at least so many bytes; throws CudaError.  It is given back some time after its last
// owner has let go of it, behind what is in the streams of its users then.
std::shared_ptr<void> ownMemory(int device, size_t bytes, StreamUsers users);

// Waits for what is in a stream now.  It has no deadline: only the thread that gives memory back
// waits here, and memory that a GPU may still use must not be given back.
void await(CUstream_st* stream);

// The piece that holds all of these bytes and still has an owner; null if there is none.
std::shared_ptr<OwnSegment> ownSegmentOf(const void* data, size_t bytes);
std::shared_ptr<OwnSegment> ownSegmentWithId(uint64_t id);

}  // namespace ringreduce::cuda
