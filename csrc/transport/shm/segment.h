// A rank's shared memory: an anonymous file (memfd), sealed against a change of its size.
//
// It has no name in any file system, so nothing is left behind however its owner ends, and the size
// of /dev/shm does not matter.  Processes get it as a file descriptor (bootstrap/rendezvous.cc).
// The memory lives as long as a process maps it, so a peer can finish reading the data of a dead
// rank.
#pragma once

#include <cstddef>
#include <memory>

#include "base/fd.h"

namespace ringreduce {

class Segment {
 public:
  // Creates one of `bytes`, zeroed.  Throws Error(kSetup).
  static std::shared_ptr<Segment> create(size_t bytes);

  // Maps another rank's segment.  Refuses one that is not sealed or has another size: accessing
  // memory that its owner has truncated would kill this process.  A process maps a file once only,
  // so that ThreadSanitizer sees that ranks that are threads share addresses.
  static std::shared_ptr<Segment> attach(Fd fd, size_t bytes);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  int fd() const { return fd_.get(); }
  // Keeps the mapping.  The descriptor is needed only until the other ranks have theirs.
  void closeFd();

 private:
  Segment(Fd fd, std::byte* data, size_t size) : fd_(std::move(fd)), data_(data), size_(size) {}
  static std::shared_ptr<Segment> map(Fd fd, size_t bytes);

  Fd fd_;
  std::byte* data_;
  size_t size_;
};

}  // namespace ringreduce
