// Where a tensor lies for the other ranks of a host: in which segment of its rank, and at which
// offset.
//
// A segment is memory that other processes map (memory/segment_board.h).  Its number is never used
// twice by a rank, so a kernel that knows a number too early or too late finds that it does not
// know the memory, and never takes other memory for it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bytes.h"

namespace ringreduce::cuda {

struct Place {
  uint64_t segment = 0;  // 0: none that the other ranks could map
  uint64_t offset = 0;   // bytes from its begin

  bool operator==(const Place&) const = default;
};

// Segments of a rank that its peers can map at a time; a power of two.
inline constexpr uint64_t kMostSegments = 256;

// What a rank's kernels know of a segment, in their own GPU's memory, at [owner][number modulo
// kMostSegments].  Of another rank's segment: `number` is set while it is mapped here.  Of an own
// one: while all other ranks map it.  The mapping thread writes it; `number` is written last when
// it is set, and first when it is cleared.
struct SegmentEntry {
  uint64_t number;
  std::byte* data;  // as mapped here
  uint64_t bytes;
};

// Where a rank's tensors of a call are, as it tells its peers: in the line of a flag (push.h), or
// in a list (direct_schedule.h).
struct Location {
  Place in, out;      // none: in the rank's window (device_layout.h), or the half
  uint64_t what = 0;  // a hash of the call, which must be the same on all ranks

  bool operator==(const Location&) const = default;
};

// Where a place of rank r is mapped here, of which `bytes` are meant; null if they do not all lie
// in memory that is.
template <class Rules>
RINGREDUCE_DEVICE std::byte* tensorAt(SegmentEntry* table, int r, const Place& place,
                                      size_t bytes) {
  if (!table) return nullptr;
  const SegmentEntry& known =
      table[static_cast<size_t>(r) * kMostSegments + place.segment % kMostSegments];
  if (Rules::template hear<Rules>(known.number) != place.segment) return nullptr;
  const size_t all = Rules::template hear<Rules>(known.bytes);
  if (place.offset > all || bytes > all - place.offset) return nullptr;
  return reinterpret_cast<std::byte*>(
             Rules::template hear<Rules>(reinterpret_cast<const uint64_t&>(known.data))) +
         place.offset;
}

}  // namespace ringreduce::cuda
