// The counters of a pipe: a one-way, bounded, ordered queue of slots from a sender to a receiver.
//
//     sender:    hasRoom()   its next slot is free       post()      it is filled
//     receiver:  hasNext()   its next slot is filled     release()   it has been read
//
// Message i uses slot i mod depth.  Only the sender writes `filled`, the number of posted messages;
// only the receiver writes `emptied`, the number of released ones.  The sender fills a slot after
// its previous message was released, the receiver reads it after it was posted, and each writes its
// counter after it has accessed the slot.  So a slot has one user at a time.  No counter is ever
// reset.
//
// Nothing here waits: links of a CPU (shm_link.h) and thread blocks of a GPU
// (cuda/kernels/ring_kernel.h) wait for the same two conditions in different ways.
#pragma once

#include <cstdint>

#include "transport/shm/flags.h"

namespace ringreduce {

// The slot of a message.  A depth that divides 2^64 keeps this right when a counter wraps around.
constexpr uint64_t slotOf(uint64_t message, uint64_t depth) {
  return message % depth;
}
// Whether the slot of message `next` is free when `emptied` messages have been released.
constexpr bool slotIsFree(uint64_t next, uint64_t emptied, uint64_t depth) {
  return reached(emptied + depth, next + 1);
}
constexpr bool slotIsFilled(uint64_t next, uint64_t filled) {
  return reached(filled, next + 1);
}
static_assert(slotIsFree(0, 0, 1) && !slotIsFree(1, 0, 1) && slotIsFree(1, 1, 1));
static_assert(slotIsFree(3, 0, 4) && !slotIsFree(4, 0, 4) && slotIsFree(4, 1, 4));
static_assert(!slotIsFilled(0, 0) && slotIsFilled(0, 1) && !slotIsFilled(1, 1));
// Across the wrap: messages 2^64 - 1 and 0 are consecutive, and so are their slots.
static_assert(slotOf(~uint64_t{0}, 4) == 3 && slotOf(0, 4) == 0);
static_assert(!slotIsFree(2, ~uint64_t{0} - 1, 4) && slotIsFree(2, ~uint64_t{0}, 4));
static_assert(slotIsFilled(~uint64_t{0}, 0) && !slotIsFilled(0, 0));

template <class Rules>
struct PipeSender {
  Flag* emptied;  // in the sender's own memory
  Flag* filled;   // in the receiver's
  uint64_t depth;
  uint64_t next = 0;             // the next message
  uint64_t seen = next - depth;  // `emptied` as last read; initially its lower bound

  RINGREDUCE_DEVICE bool hasRoom() {
    if (isFree()) return true;
    seen = emptied->observe<Rules>();
    return isFree();
  }
  RINGREDUCE_DEVICE uint64_t slot() const { return slotOf(next, depth); }
  // All threads that share a sender count; one of them publishes.
  RINGREDUCE_DEVICE void post(bool publishes = true) {
    ++next;
    if (publishes) filled->publish<Rules>(next);
  }

 private:
  RINGREDUCE_DEVICE bool isFree() const {
    return slotIsFree(next, seen, depth + Rules::kEarlyReuse);
  }
};

template <class Rules>
struct PipeReceiver {
  Flag* filled;   // in the receiver's own memory
  Flag* emptied;  // in the sender's
  uint64_t depth;
  uint64_t next = 0;     // the next message
  uint64_t seen = next;  // `filled` as last read

  RINGREDUCE_DEVICE bool hasNext() {
    if (slotIsFilled(next, seen)) return true;
    seen = filled->observe<Rules>();
    return slotIsFilled(next, seen);
  }
  RINGREDUCE_DEVICE uint64_t slot() const { return slotOf(next, depth); }
  RINGREDUCE_DEVICE void release(bool publishes = true) {
    ++next;
    if (publishes) emptied->publish<Rules>(next);
  }
};

}  // namespace ringreduce
