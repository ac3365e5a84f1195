// How the ranks of a group find each other through the store, on one host or several.
//
//   1. Rank 0 publishes an invitation under one key: its host's id, the name of its Unix socket and
//      a secret.
//   2. A rank on that host connects and sends its entry: a random token, its host's id, its pid,
//      its world size.  Any other rank puts its entry into the store.
//   3. If all ranks connect, they exchange their memory (bootstrap/host_memory.h), which ends the
//      rendezvous.
//   4. If some are on other hosts, or with RINGREDUCE_WIRE=tcp, rank 0 publishes the table of all
//      entries in the invitation's place.  Each rank confirms the table that lists its token, in
//      its entry, together with its settings (`own_settings`).  Rank 0 publishes all of
//      that.
//
// An entry of an earlier run on the same store may be in the table at first.  Its token is then not
// confirmed; once the rank's own entry replaces it, rank 0 publishes a new table.  An invitation
// of an earlier run leads to a socket where no process listens.
//
// If a rank gives up, rank 0 learns it from that rank's connection or entry.  If rank 0 gives up,
// the reason takes the table's place for the ranks that have come, and for those that come later.
// No key holds a value when all ranks have met, so a group can be made again on the same store.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "bootstrap/host_memory.h"
#include "bootstrap/options.h"
#include "bootstrap/store.h"
#include "bootstrap/topology.h"

namespace ringreduce {

struct Rendezvous {
  HostMemory host_memory;      // of all ranks, if they share memory
  std::optional<Hosts> hosts;  // otherwise
  std::string id = {};         // of this meeting, a random one: the same on all ranks
};

// The settings that this rank sends to the others, called with the hosts that were found; again if
// they change.  An exception ends the rendezvous on all ranks.
using OwnSettings = std::function<std::string(const Hosts&)>;

// Collective.  Throws Error: kTimeout naming the ranks that did not come, kSetup for errors
// that waiting cannot mend: another world size, version or user, two processes of one rank.
Rendezvous rendezvous(Store& store, int rank, int world_size, const GroupOptions& options,
                      const OwnSettings& own_settings);
// By rank 0, once all ranks of several hosts have read the last table: they have joined the group.
// After a failure the next table replaces it.
void removeTable(Store& store);

}  // namespace ringreduce
