// What takes the place of the ranks that a group has, when they change: after a loss, when
// newcomers join, in a reconfigure.
//
//   1. The members meet at a place in the store that no other attempt uses, and make it.  The
//      attempt (bootstrap/attempt.h) can be ended meanwhile.
//   2. A barrier: where it returns, all members have made it.
//   3. Each member swaps: what it calls from then on runs in the successor.
//   4. It leaves the old ranks.
//
// If a step fails before the third, a rank goes on with the old ranks and gives the successor up.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include "base/clock.h"
#include "base/executor.h"
#include "base/limits.h"
#include "bootstrap/options.h"
#include "bootstrap/store.h"
#include "epoch/epoch.h"
#include "epoch/operation.h"

namespace ringreduce {

// The first two steps, within options.timeout and what ranks grant each other beyond it. Collective
// over options.members of a group of `size` ranks, which meet at options.place.  Throws Error.
// `meet(epoch, barrier)`: runs the barrier in the epoch that is made.
template <class Meet>
void makeSuccessor(Store& store, int rank, int size, const GroupOptions& options,
                   Executor& executor, const Epoch::MakeLocal& make_local, const Meet& meet) {
  const Nanos until = deadlineIn(options.timeout);
  std::shared_ptr<Epoch> epoch = Epoch::create(store, rank, size, options, executor, make_local);
  // A member may have failed to make it, and tells so later than its timeout.
  const Nanos left = std::max<Nanos>(until - now(), 0) + limits::kLaterNews;
  meet(std::move(epoch), Operation{.call = Barrier{}, .timeout = left});
}

}  // namespace ringreduce
