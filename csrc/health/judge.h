// The judge: which rank is late, which one differs, which one is lost by what the view says.  The
// functions look at what this rank knows, change nothing, and return the rank that is to blame and
// the text of an error. Whether the group fails by it is decided elsewhere: by the arbiter, and for
// work in streams of GPUs by the watchdog.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/op_signature.h"
#include "health/peer_view.h"

namespace ringreduce {

struct Finding {
  Failure kind = Failure::kNone;
  std::vector<int> ranks;  // to blame; the first is the error's
  std::string text;        // "rank 2 (pid 7 on host a) did not arrive"

  int culprit() const { return ranks.empty() ? kNobody : ranks.front(); }
};

// ---- late

// In a collective, in which this rank waits for rank `waited_for`.
Finding late(const PeerView& peers, const OpSignature& operation, int waited_for);

// In a stream.  `announced`: how many operations that rank has announced.  `unfinished`: the
// finding if all have come, and none is stopped.
Finding lateInStream(const PeerView& peers, const OpSignature& operation,
                     const std::function<uint64_t(int rank)>& announced,
                     const std::function<Finding()>& unfinished);

// In a message to or from `peer` (-1: from any rank).  `missing`: what it has not done, " did not
// send it".  That rank may itself wait for a third one in a collective, which is to blame then.
Finding lateMessage(const PeerView& peers, int peer, const std::string& missing);
// The same without looking who else is late.
Finding undone(const PeerView& peers, int peer, const std::string& missing);

// ---- differs

// In collectives: the largest party is right; of equal ones, the first, which has the lowest rank.
// `sent`: what rank `other` sent, or null; it counts if all announced the same.
Finding differs(const PeerView& peers, PeerView::Census found, int other, const OpSignature* sent);

// ---- lost

// That rank is lost or has left, or is neither, but `how` says why it cannot be reached.  `when`:
// "during barrier #3".
Finding lost(const PeerView& peers, int rank, const std::string& when, const std::string& how);

// A message to or from `ranks` is over, which are all gone.  kNone: they have left, and none of
// them is lost.
Finding gone(const PeerView& peers, const std::vector<int>& ranks, const std::string& doing);

}  // namespace ringreduce
