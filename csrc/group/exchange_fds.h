// Gives each rank of a group that exists a file descriptor of each other rank: shared memory, GPU
// memory; and memory that all ranks of a host map.  How a group itself is made on a host is in
// bootstrap/host_memory.h.
//
// Each rank listens on an abstract Unix socket and sends its random name and a random secret to the
// other ranks through the group.  Of two ranks the higher connects to the lower, and both send
// their descriptors.  A caller of another user, without the secret or with an invalid message is
// dropped without an answer.  No rank waits for a single other rank, so ranks cannot block each
// other.  A lost rank, or the group's deadline, fails the group for all.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "base/fd.h"
#include "group/group.h"
#include "transport/shm/segment.h"

namespace ringreduce {

// Collective.  Returns the descriptors of the other ranks, by rank: empty for this rank, and for a
// rank that sent none.  `mine`, or -1 for none, remains the caller's.  `what` names it in errors:
// "GPU memory".  Throws the same Error on all ranks.  After an error in the set-up of the sockets
// the group is still usable.
std::vector<Fd> exchangeFds(Group& group, int mine, const std::string& what);

// Memory of the host that all ranks of a group map, one segment (transport/shm/segment.h) for each
// rank.
class HostPages {
 public:
  // Collective, with the same `bytes` on all ranks: that much for each, zeroed, rounded up to whole
  // pages.  Throws the same Error on all ranks.
  HostPages(Group& group, size_t bytes);

  size_t bytes() const { return segments_[0]->size(); }
  std::byte* at(int rank) const { return segment(rank)->data(); }
  // Ranks that are threads of one process have the same object.
  const std::shared_ptr<Segment>& segment(int rank) const {
    return segments_[static_cast<size_t>(rank)];
  }

 private:
  std::vector<std::shared_ptr<Segment>> segments_;  // by rank
};

}  // namespace ringreduce
