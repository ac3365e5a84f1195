// Who stands beside whom in the control ring, and who can still be reached in it: pure functions.
#pragma once

#include <cstddef>
#include <set>
#include <utility>
#include <vector>

namespace ringreduce::net {

class ControlRing {
 public:
  // `order` holds each rank once; empty: 0, 1, ... size - 1.
  ControlRing(int size, std::vector<int> order);

  void remove(int rank);  // it has left, or ended
  bool has(int rank) const { return here_[static_cast<size_t>(rank)]; }

  // The first rank after `rank` (which need not be there any more), or before it, that is still
  // there; `rank` itself if it is alone.
  int next(int rank) const { return beside(rank, 1); }
  int previous(int rank) const { return beside(rank, -1); }

  // The ranks still there that `me` cannot hear of any more: the ring is cut between two neighbours
  // if they are a pair of `cuts`.  `linked`: those to whom it has connections in any case; of
  // them, and of cuts, those that are not there any more count for nothing.
  using Cuts = std::set<std::pair<int, int>>;  // the smaller rank first
  std::vector<int> beyond(int me, const Cuts& cuts, const std::vector<int>& linked) const;

 private:
  int beside(int rank, int step) const;

  std::vector<int> order_, place_;
  std::vector<bool> here_;
};

}  // namespace ringreduce::net
