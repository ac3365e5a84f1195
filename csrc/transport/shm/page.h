// The start of each rank's shared segment: its flags, its operations' signatures, its departure.
//
// Every rank of a host maps the pages of all others.  Unless a line says otherwise, only the page's
// owner writes to it.
#pragma once

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

// Where the data of an operation lie in a block (shared_block.h) that peers can map.
struct TensorOffer {
  uint64_t block;  // its number; 0: the data are not in a block
  uint64_t offset, bytes;
  uint64_t device, inode;  // of the block's file, which peers open as a descriptor of this process
  int32_t pid, fd;
};

struct RankPage {
  Flag posted;    // exchange: steps whose slot is filled
  Flag reduced;   // exchange: steps whose slot holds this rank's share of the sum (two-shot)
  Flag done;      // exchange: steps whose slots this rank has read to the end
  Flag inbound;   // ring link from the previous rank: slots filled; written by that rank
  Flag outbound;  // ring link to the next rank: slots read; written by that rank

  Flag announced;  // operations announced
  OpSignature announcements[kAnnouncements];
  TensorOffer offers[kAnnouncements];  // of the same operations; written before `announced`

  alignas(kLine)
      uint32_t wake_word;  // wakeWordFor(r) while the owner sleeps and waits for rank r, else 0
  alignas(kLine) uint32_t messenger_wake_word;  // 1 while the owner sleeps and waits for messages
  alignas(kLine) uint32_t departed;             // a Declared of the owner

  // Why the group has failed, or 0: written once, by the first rank that found a cause.  Only the
  // page of the host's first rank counts.  `record` is the text of a failure that this page's owner
  // reported.
  alignas(kLine) uint64_t failure;
  alignas(kLine) char record[2048];
};

}  // namespace ringreduce
