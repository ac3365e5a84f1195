// Gives each rank of a group a file descriptor of each other rank: shared memory, GPU memory.
//
// Each rank listens on an abstract Unix socket of its own and tells the others its random name and
// a random secret through the group.  Of two ranks the higher connects to the lower, and both send
// what they have.  Whoever runs as another user, does not know the listener's secret or sends what
// cannot be read is dropped without an answer.  No rank waits for one other alone, so there is no
// order in which they could block each other; a rank that dies, or the group's deadline, ends the
// group for all.
#pragma once

#include <string>
#include <vector>

#include "base/fd.h"
#include "group/group.h"

namespace ringreduce {

// Collective.  Returns the others' descriptors, by rank: none of this rank's own, and none of a
// rank that gave none.  `mine`, -1 for none, stays the caller's.  `what` is the word for it in
// messages: "GPU memory".  Throws the same Error on all ranks; after one that the set-up of the
// sockets met, the group is still usable.
std::vector<Fd> exchangeFds(Group& group, int mine, const std::string& what);

}  // namespace ringreduce
