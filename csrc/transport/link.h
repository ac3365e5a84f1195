// The interface of a link: a one-way, bounded, ordered queue of slots from one rank to the next.
// shm_link.h implements it in shared memory.
//
//     sender:    acquire()  a free slot to fill       post()     it is filled
//     receiver:  peek()     the oldest filled slot    release()  it has been read
//
// Slots arrive in the order in which they were posted.  acquire and peek wait, and throw what the
// WaitGuard throws.  Two calls of acquire (or peek) without post (or release) between them return
// the same slot.
#pragma once

#include <cstddef>

namespace ringreduce {

class SendLink {
 public:
  virtual ~SendLink() = default;
  virtual std::byte* acquire() = 0;
  virtual void post() = 0;
};

class RecvLink {
 public:
  virtual ~RecvLink() = default;
  virtual const std::byte* peek() = 0;
  virtual void release() = 0;
};

}  // namespace ringreduce
