// A link: a one-way, bounded, ordered pipe of slots from one rank to the next.  This is the
// contract; shm_link.h keeps it over shared memory.
//
//     sender:    acquire()  a free slot to fill       post()     it is filled
//     receiver:  peek()     the oldest filled slot    release()  it has been read
//
// Slots come out in the order in which they went in.  acquire and peek wait, and throw what the
// WaitGuard throws.  Calling acquire (or peek) twice without a post (or release) between gives the
// same slot.
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
