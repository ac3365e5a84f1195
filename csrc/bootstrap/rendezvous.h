// How the ranks of a group find each other through the store, on one host or several.
//
//   1. Each rank puts a record into the store: a random token, its host's id, its pid, its world
//      size.
//   2. Rank 0 gathers all records and publishes the table of them, with a nonce and a secret.
//   3. Every rank confirms the table that lists its token.  The ranks of one host confirm it by
//      exchanging their memory (bootstrap/membership.h), which ends the rendezvous.  Ranks of
//      several hosts, or with RINGREDUCE_WIRE=tcp, confirm it in their records, together with what
//      the others must know of them (`tell`), and rank 0 publishes all of that.
//
// A record of an earlier run on the same store may be in the table at first.  Its token is then not
// confirmed; once the rank's own record replaces it, rank 0 publishes a new table.
//
// If a rank gives up, rank 0 learns it from that rank's record or connection.  If rank 0 gives up,
// the reason takes the table's place for the ranks that have come, and for those that come later.
// No key holds a value when all ranks have met, so a group can be made again on the same store.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "bootstrap/hosts.h"
#include "bootstrap/membership.h"
#include "bootstrap/options.h"
#include "bootstrap/store.h"

namespace ringreduce {

struct Rendezvous {
  Membership membership;       // of all ranks, if they share memory
  std::optional<Hosts> hosts;  // otherwise
};

// The text that this rank sends to the others, called with the hosts that were found; again if they
// change.  What it throws ends the rendezvous on all ranks.
using Tell = std::function<std::string(const Hosts&)>;

// Collective.  Throws Error: kTimeout naming the ranks that did not come, kSetup for what waiting
// cannot mend: another world size, version or user, two processes of one rank.
Rendezvous rendezvous(Store& store, int rank, int world_size, const GroupOptions& options,
                      const Tell& tell);

}  // namespace ringreduce
