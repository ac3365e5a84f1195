// Which side of the rendezvous a rank is on.
#include "group/rendezvous.h"

#include "base/align.h"
#include "wire/channel.h"
#include "wire/page.h"

namespace ringreduce {

// hub.cc
Membership joinAsHub(Store& store, int size, const GroupOptions& options);
// caller.cc
Membership joinAsCaller(Store& store, int rank, int size, const GroupOptions& options);

Layout::Layout(const SharedOptions& options, int world_size) {
  const size_t slots = options.slot_bytes * static_cast<size_t>(options.slots);
  const auto P = static_cast<size_t>(world_size);
  exchange = roundUp(sizeof(Page), 4096);
  link = exchange + slots;
  boxes = link + slots;
  rings = roundUp(boxes + P * sizeof(Box), 4096);
  bytes = rings + P * kRingBytes;
}

Membership join(Store& store, int rank, int size, const GroupOptions& options) {
  Membership membership =
      rank == 0 ? joinAsHub(store, size, options) : joinAsCaller(store, rank, size, options);
  for (const Member& member : membership.members) member.segment->closeFd();
  return membership;
}

}  // namespace ringreduce
