// The counters of a pipe: a one-way, bounded, ordered line of slots from a sender to a receiver.
//
//     sender:    hasRoom()   its next slot is free       post()      it is filled
//     receiver:  hasNext()   its next slot is filled     release()   it has been read
//
// Message i goes through slot i mod depth.  `filled` counts messages posted and is written by the
// sender alone, `emptied` counts messages released and is written by the receiver alone.  The
// sender fills a slot only once the message that was in it is released, the receiver reads it only
// once it is posted, and each writes its counter after it has touched the slot: so whoever touches
// a slot has it for itself.  No counter is ever reset.
//
// Nothing here waits: links of a CPU (shm_link.h) and thread blocks of a GPU (cuda/primitives.h)
// wait in their own ways for the same two conditions.
#pragma once

#include <cstdint>

#include "transport/shm/flags.h"

namespace ringreduce {

// Where a message goes.  A depth that divides 2^64 keeps this right when a counter passes it.
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
// Across the wrap: messages 2^64 - 1 and 0 follow each other, in slots that do.
static_assert(slotOf(~uint64_t{0}, 4) == 3 && slotOf(0, 4) == 0);
static_assert(!slotIsFree(2, ~uint64_t{0} - 1, 4) && slotIsFree(2, ~uint64_t{0}, 4));
static_assert(slotIsFilled(~uint64_t{0}, 0) && !slotIsFilled(0, 0));

template <class Rules>
struct PipeSender {
  Flag* emptied;  // in the sender's own memory
  Flag* filled;   // in the receiver's
  uint64_t depth;
  uint64_t next = 0;             // the message to be sent
  uint64_t seen = next - depth;  // of `emptied`, as last read: at first the least it can be

  RINGREDUCE_DEVICE bool hasRoom() {
    if (isFree()) return true;
    seen = emptied->observe<Rules>();
    return isFree();
  }
  RINGREDUCE_DEVICE uint64_t slot() const { return slotOf(next, depth); }
  // All threads that share a sender count; the one that speaks for them publishes.
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
  uint64_t next = 0;     // the message to be received
  uint64_t seen = next;  // of `filled`, as last read

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
