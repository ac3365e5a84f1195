// Which rank is held responsible: for a delay, and for a mismatch.
#pragma once

#include <string>
#include <vector>

#include "base/op_signature.h"
#include "health/peer_table.h"

namespace ringreduce {

// The ranks that the others wait for, and a text: "rank 2 (pid 7 on host a) did not arrive".
struct Laggards {
  std::vector<int> ranks;
  std::string text;
};

// Those of an operation in which this rank waits for rank `waited_for`.
Laggards laggardsOf(const PeerTable& peers, const OpSignature& operation, int waited_for);

// Of the ranks that a receive from any rank waits for: a stopped one, or the first of all.
int firstOfAny(const PeerTable& peers);

struct Disagreement {
  int culprit;
  std::string text;
};

// The largest party is right; of equal ones, the first, which has the lowest rank.  `sent`: what
// rank `other` sent, or null; it counts if all announced the same.
Disagreement disagreementOf(const PeerTable& peers, PeerTable::Census found, int other,
                            const OpSignature* sent);

}  // namespace ringreduce
