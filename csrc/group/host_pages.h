// Memory of the host that all ranks of a group map, a piece of it for each rank.
//
// It is a memfd like a rank's shared memory (transport/shm/segment.h): nothing of it is left
// behind, it lives as long as anybody maps it, also when its owner has died.  Who writes what in it
// is its users' business.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "group/group.h"
#include "transport/shm/segment.h"

namespace ringreduce {

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
