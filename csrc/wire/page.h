// What lies at the start of each rank's shared segment: its flags, its announcements, its last
// words.
//
// Every rank of a host maps every other's page.  Unless a line says otherwise, only the page's
// owner writes to it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

#include "base/dtype.h"
#include "wire/flags.h"

namespace ringreduce {

enum class Kind : uint8_t {
  kAllReduce,
  kReduce,
  kReduceScatter,
  kBroadcast,
  kAllGather,
  kGather,
  kScatter,
  kAllToAll,
  kBarrier,
  kSparseAllReduce,
  kMonitoredBarrier,
  kCompressedAllReduce,
};
inline constexpr const char* kKindNames[] = {"all_reduce",        "reduce",
                                             "reduce_scatter",    "broadcast",
                                             "all_gather",        "gather",
                                             "scatter",           "all_to_all",
                                             "barrier",           "sparse all_reduce",
                                             "monitored_barrier", "compressed all_reduce"};
inline constexpr size_t kKindCount = std::size(kKindNames);
inline constexpr uint8_t kNoReduceOp = 0xff;
inline constexpr int32_t kNoRoot = -1;

// What an operation is, as far as ranks must agree on it.
struct Announcement {
  uint64_t sequence = 0;  // operations of this group before this one
  uint64_t count = 0;     // elements
  uint64_t history = 0;   // a hash of all operations before it
  Kind kind = Kind::kBarrier;
  DType dtype = DType::kUInt8;
  uint8_t op = kNoReduceOp;
  int32_t root = kNoRoot;
  // Where it has parts of unequal sizes: a hash of these.  Of a compressed all-reduce: how it is
  // coded (group/operation.h).
  uint64_t parts = 0;

  bool operator==(const Announcement&) const = default;
};
inline constexpr uint64_t kNoOperation = ~uint64_t{0};  // as a sequence: nothing was announced

// Whether a rank of a group of `size` can have announced this: what comes from elsewhere is looked
// at before it is believed, since texts name what stands there.
constexpr bool isSound(const Announcement& a, int size) {
  return static_cast<size_t>(a.kind) < kKindCount &&
         static_cast<size_t>(a.dtype) < kDTypes.size() &&
         (a.op < kReduceOps || a.op == kNoReduceOp) &&
         (a.root == kNoRoot || (a.root >= 0 && a.root < size));
}

// How far a rank may be ahead of another is bounded by the slots it can fill (kMaxSlots
// operations), so an announcement is still there when a slower rank compares it with its own.
inline constexpr uint64_t kAnnouncements = 64;
inline constexpr int kMaxSlots = 32;
static_assert(kAnnouncements >= 2 * kMaxSlots);

constexpr uint32_t bellFor(int rank) {
  return static_cast<uint32_t>(rank) + 1;
}

// How far a rank has left normally.
enum class Departure : uint32_t {
  kHere,
  kLeaving,  // calls no more collectives and receives no more messages, but still sends some
  kGone,
};

struct Page {
  Flag posted;    // exchange: steps whose slot is filled
  Flag reduced;   // exchange: steps whose slot holds this rank's share of the sum (two-shot)
  Flag done;      // exchange: steps whose slots this rank has read to the end
  Flag inbound;   // ring link from the previous rank: slots filled; written by that rank
  Flag outbound;  // ring link to the next rank: slots read; written by that rank

  Flag announced;  // operations announced
  Announcement announcements[kAnnouncements];

  alignas(kLine) uint32_t bell;  // bellFor(r) while the owner sleeps and waits for rank r, else 0
  alignas(kLine) uint32_t messenger_bell;  // 1 while the owner sleeps and waits for messages
  alignas(kLine) uint32_t departed;        // a Departure of the owner

  // The group's verdict: 0, or why it ended, written once by the first to know.  Only the page of
  // the host's first rank counts.  `record` is the text of a verdict that this page's owner
  // reported.
  alignas(kLine) uint64_t verdict;
  alignas(kLine) char record[2048];
};

}  // namespace ringreduce
