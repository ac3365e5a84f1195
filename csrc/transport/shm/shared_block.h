// Memory for tensors that the other ranks of a host can map: collectives read and write it in place
// (transport/shm/shared_tensors.h).
//
// A block belongs to the process, not to a group, and may outlive every group.  When it ends its
// memory is freed at once, also where peers still map it.  A forked child cannot change it, but
// sees what the parent and its peers write later to pages that the child has not written.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/fd.h"
#include "transport/shm/segment.h"

namespace ringreduce {

class SharedBlock : public std::enable_shared_from_this<SharedBlock> {
 public:
  // Of at least `bytes`, zeroed, in whole pages.  Throws Error(kSetup).
  static std::shared_ptr<SharedBlock> create(size_t bytes);

  // A block that was kept, with whatever bytes its last owner left, else a new one.
  static std::shared_ptr<SharedBlock> reuse(size_t bytes);
  // Keeps a block for reuse(), unless something else still refers to it.  Only blocks of sizes that
  // are asked for repeatedly are kept, as FSDP does in each step; for some seconds, and up to a
  // number of bytes.  Reuse costs no system calls.  It costs peers no new mapping if all ranks
  // release their blocks in the same order.
  static void keep(std::shared_ptr<SharedBlock> block);
  // Frees what is kept.
  static void dropKept();

  // The block that all these bytes lie in; null if there is none, or if it is detached.
  static std::shared_ptr<SharedBlock> holding(const void* data, size_t bytes);

  ~SharedBlock();
  SharedBlock(const SharedBlock&) = delete;
  SharedBlock& operator=(const SharedBlock&) = delete;

  std::byte* data() const { return segment_->data(); }
  size_t size() const { return segment_->size(); }
  uint64_t number() const { return number_; }  // from 1; no two blocks of a process have the same
  int fd() const { return fd_; }
  dev_t device() const { return device_; }
  ino_t inode() const { return inode_; }

  // Replaces the pages that hold nothing but these bytes by private copies: what peers write to
  // them later does not change this process's.  Other groups may be using the rest.  The block is
  // not offered again.  Throws Error(kSetup).
  void detach(const std::byte* begin, size_t bytes);

 private:
  friend struct SharedBlocks;
  explicit SharedBlock(std::shared_ptr<Segment> segment);

  const int generation_ = forkGeneration();
  std::shared_ptr<Segment> segment_;
  const uint64_t number_;
  // Not an Fd: a forked child needs it before it closes it.
  int fd_ = -1;
  dev_t device_ = 0;
  ino_t inode_ = 0;
  bool detached_ = false;  // guarded by the mutex of all blocks
};

}  // namespace ringreduce
