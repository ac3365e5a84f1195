// The start of each rank's shared segment: its flags, its operations' signatures, its departure.
//
// Every rank of a host maps the pages of all others.  Unless a line says otherwise, only the page's
// owner writes to it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/op_signature.h"
#include "transport/shm/flags.h"
#include "transport/wait_guard.h"

namespace ringreduce {

// A rank can be ahead of another by as many operations as it has slots (kMaxSlots), so a signature
// is still there when a slower rank compares it with its own.
inline constexpr uint64_t kAnnouncements = 64;
inline constexpr int kMaxSlots = 32;
static_assert(kAnnouncements >= 2 * kMaxSlots);

constexpr uint32_t wakeWordFor(int rank) {
  return static_cast<uint32_t>(rank) + 1;
}

// The message that a thread of a rank waits for.
struct AwaitedMessage {
  bool exists = false, is_send = false;
  int peer = -1;  // -1: any rank

  uint32_t word() const {
    return exists ? static_cast<uint32_t>(peer + 2) << 1 | static_cast<uint32_t>(is_send) : 0;
  }
  static AwaitedMessage of(uint32_t word) {
    if (word == 0) return {};
    return {.exists = true, .is_send = (word & 1) != 0, .peer = static_cast<int>(word >> 1) - 2};
  }
};

// Where the data of an operation lie in a block (shared_block.h) that peers can map.
struct TensorOffer {
  uint64_t block;  // its number; 0: the data are not in a block
  uint64_t offset, bytes;
  uint64_t device, inode;  // of the block's file, which peers open as a descriptor of this process
  int32_t pid, fd;
  bool is_output;  // of a call that can share its input or its output
};

struct RankPage {
  Flag posted;    // exchange: steps whose slot is filled
  Flag reduced;   // exchange: steps whose slot holds this rank's share of the sum (two-shot)
  Flag done;      // exchange: steps whose slots this rank has read to the end
  Flag inbound;   // ring link from the previous rank: slots filled; written by that rank
  Flag outbound;  // ring link to the next rank: slots read; written by that rank

  Flag announced;  // operations announced
  Announcement announcements[kAnnouncements];
  TensorOffer offers[kAnnouncements];  // of the same operations; written before `announced`

  alignas(kLine)
      uint32_t wake_word;  // wakeWordFor(r) while the owner sleeps and waits for rank r, else 0
  alignas(kLine) uint32_t messenger_wake_word;  // 1 while the owner sleeps and waits for messages
  uint32_t awaited_message;                     // an AwaitedMessage of the owner, for errors
  alignas(kLine) uint32_t bell_word;            // 1 while its doorbell is to be rung (byte_pipe.h)
  alignas(kLine) uint32_t departed;             // a Declared of the owner

  // Written by the other ranks, in a group that survives losses, when they go on without the owner.
  alignas(kLine) uint32_t left_out;
  uint64_t last_posted, last_reduced;  // 1 + the agreed value of the flag; 0: none is agreed yet

  // The owner answers, if its process runs: `pulses` counts, after pulse_wake_word was woken.
  alignas(kLine) uint32_t pulse_wake_word;
  uint32_t pulses;

  // Why the group has failed, or 0: written once, by the first rank that found a cause.  Only the
  // page of the host's first rank counts.  `failure_text` is the text of a failure that this page's
  // owner reported.
  alignas(kLine) uint64_t failure;
  alignas(kLine) char failure_text[2048];
};

// ---- a rank that is left out
//
// Its process may be one that was frozen and runs again, in the middle of an operation.  So its
// flags count no further than the other ranks agree: a rank first sets `left_out`, and only then
// reads a flag, and the first such value holds for all.  A rank that has read a larger value looks
// at `left_out` afterwards, and uses the value that was agreed if it is set.  If it is not, all
// that set it later read no smaller value.
//
// It looks at `left_out` itself at the end of an operation, after it has published `done` for the
// slots that it has read.  The others fill these anew only after leaveOut, whose loads follow its
// store.  So it sees `left_out` if it has read anything else (flags.h has the orders).

inline bool isLeftOut(RankPage& page) {
  return std::atomic_ref(page.left_out).load(std::memory_order_seq_cst) != 0;
}

// How far a flag of a rank that is left out counts; `last` is of the same page.
inline uint64_t agreedValue(Flag& flag, uint64_t& last) {
  const std::atomic_ref agreed(last);
  uint64_t known = agreed.load(std::memory_order_seq_cst);
  if (known == 0)
    if (const uint64_t seen = flag.observe() + 1;
        agreed.compare_exchange_strong(known, seen, std::memory_order_seq_cst))
      known = seen;
  return known - 1;
}

inline void leaveOut(RankPage& page) {
  std::atomic_ref(page.left_out).store(1, std::memory_order_seq_cst);
  agreedValue(page.posted, page.last_posted);
  agreedValue(page.reduced, page.last_reduced);
}

}  // namespace ringreduce
