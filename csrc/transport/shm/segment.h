// A rank's shared memory: an anonymous file (memfd), sealed so that nobody can change its size.
//
// It has no name in any file system, so nothing is left behind whatever happens to its owner, and
// the size of /dev/shm does not matter.  Processes get it as a file descriptor
// (bootstrap/rendezvous.cc). The memory lives as long as anybody maps it: a peer finishes reading
// what a dead rank had posted.
#pragma once

#include <cstddef>
#include <memory>

#include "base/fd.h"

namespace ringreduce {

class Segment {
 public:
  // Makes one of `bytes`, zeroed.  Throws Error(kSetup).
  static std::shared_ptr<Segment> create(size_t bytes);

  // Maps another rank's.  Refuses one that is not sealed or not of this size: touching memory that
  // its owner cuts short would kill this process.  Within one process a file is mapped once only,
  // so that ThreadSanitizer sees ranks that are threads share addresses.
  static std::shared_ptr<Segment> attach(Fd fd, size_t bytes);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  int fd() const { return fd_.get(); }
  // The mapping stays; the descriptor is needed only until the others have theirs.
  void closeFd();

 private:
  Segment(Fd fd, std::byte* data, size_t size) : fd_(std::move(fd)), data_(data), size_(size) {}
  static std::shared_ptr<Segment> map(Fd fd, size_t bytes);

  Fd fd_;
  std::byte* data_;
  size_t size_;
};

}  // namespace ringreduce
