// How the ranks of a group on several hosts agree to go on after a loss.
//
// Between hosts an operation counts as a whole:
//
//   1. A rank that holds the whole result of an operation enters a barrier, and returns after it.
//      So if any rank has returned, all ranks hold that result.
//   2. After a loss each rank comes to the store with its standing: which operation it is in, and
//      whether it holds the result.
//   3. Once all ranks that are not lost have come, one of them proposes a plan: the ranks that go
//      on, and whether the operation is done or has to run again.  The store keeps the first
//      proposal, so all ranks have the same plan, however the network is cut.
//   4. The ranks of the plan make a new epoch (epoch/epoch.h).  If another rank is lost meanwhile,
//      they come to the store again.
//
// A rank that is not in the plan has been taken for lost: it may have been cut off, or stopped.  It
// raises PeerLost.  It has no connection to the new epoch, so nothing that it sends later counts.
//
// If two ranks that came cannot reach each other, one of them stays out: the one that more ranks
// cannot reach, so the larger side of a cut goes on; then the one that the other blames; then the
// higher rank.  A side that cannot reach the store raises.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "bootstrap/options.h"
#include "survival/epochs.h"
#include "survival/timed_store.h"

namespace ringreduce {

// Where a rank stands when it comes to recover.
struct Standing {
  uint64_t operation = 0;             // the one that it is in; it has returned from those before
  bool holds = false;                 // it has the whole result of that one
  int epoch = 0;                      // in which it got that result
  std::vector<int> unreachable = {};  // other ranks that it cannot reach

  std::string toText() const;
  static Standing fromText(const std::string& text);
};

struct Plan {
  std::vector<int> members;  // ascending
  uint64_t operation = 0;    // the latest that any rank is in
  bool is_done = false;      // all members hold its result
};

// The plan of the ranks that came, of which `ended` are lost by now.
Plan planOf(const std::map<int, Standing>& came, const std::vector<int>& ended);

class Recovery {
 public:
  // What the wait in `agree` needs; `poll` is called often.
  struct Watch {
    std::function<void()> poll;                             // throws to end the wait
    std::function<std::string(std::vector<int>)> nameLate;  // "rank 2 did not come"
  };

  // In a part of the store that no other group uses.  `epochs` outlives this object.
  Recovery(const std::shared_ptr<Store>& store, Epochs& epochs);

  // The ranks that go on, and how many plans there have been.
  const std::vector<int>& members() const { return members_; }
  int epoch() const { return epoch_; }
  // Calls of this store end in time.
  Store& store() const { return *store_; }
  // Where the members of the latest plan meet in it.
  std::string meeting() const { return place_ + std::to_string(epoch_) + "/"; }

  // Collective over the members that are not lost.  Throws Error on all of them: kTimeout if one
  // does not come in time, and what `giveUp` was given; kPeerLost on a rank that is not in the
  // plan.  Throws StoreFailure where the store fails.
  Plan agree(Standing own, const Watch& watch, Nanos timeout);
  // This rank ends the group for all, at the next time that they come.
  void giveUp(const Error& error);

 private:
  bool mayPropose(const std::map<int, Standing>& came, Nanos waited, std::vector<int>& late,
                  std::vector<int>& ended) const;
  Plan adopt(const std::string& text);
  std::string key(const char* what) const;

  const Epochs& epochs_;
  const int rank_;
  const GroupOptions& options_;
  const std::unique_ptr<TimedStore> store_;
  const std::string place_;
  std::vector<int> members_;
  int epoch_ = 0;
};

}  // namespace ringreduce
