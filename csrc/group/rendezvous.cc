// Which side of the rendezvous a rank is on.
#include "group/rendezvous.h"

#include "base/align.h"
#include "wire/page.h"

namespace ringreduce {

// hub.cc
Membership joinAsHub(Store& store, int size, const GroupOptions& options);
// caller.cc
Membership joinAsCaller(Store& store, int rank, int size, const GroupOptions& options);

size_t segmentBytes(const SharedOptions& options) {
  // The exchange's slots and the inbound link's.
  return roundUp(sizeof(Page), 4096) + 2 * options.slot_bytes * static_cast<size_t>(options.slots);
}

Membership join(Store& store, int rank, int size, const GroupOptions& options) {
  Membership membership =
      rank == 0 ? joinAsHub(store, size, options) : joinAsCaller(store, rank, size, options);
  for (const Member& member : membership.members) member.segment->closeFd();
  return membership;
}

}  // namespace ringreduce
