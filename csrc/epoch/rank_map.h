// Which ranks of a group an epoch includes, and how it numbers them.
//
// Callers of a group name a rank by the number that it has for as long as the group lives.  An
// epoch, with its arbiter, wires and messages, numbers only the ranks that it includes: their
// positions, 0 to P-1, in the order of their ranks.  Both are `int`; which one a function takes
// follows from its class.  Within an epoch, rings number the ranks once more, in their own order
// (transport/wait_guard.h), as does each host its own ones (bootstrap/topology.h).
#pragma once

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

namespace ringreduce {

class RankMap {
 public:
  // `members`: GroupOptions::members, ascending; empty: all of `size` ranks.
  RankMap(std::vector<int> members, int size) : ranks_(std::move(members)) {
    if (!ranks_.empty()) return;
    is_whole_ = true;
    ranks_.resize(static_cast<size_t>(size));
    std::iota(ranks_.begin(), ranks_.end(), 0);
  }

  // Whether it was made without `members`: then a rank is its own position.
  bool isWhole() const { return is_whole_; }
  const std::vector<int>& ranks() const { return ranks_; }  // by position, ascending
  int rankAt(int position) const { return ranks_[static_cast<size_t>(position)]; }
  std::optional<int> positionOf(int rank) const {
    const auto at = std::ranges::lower_bound(ranks_, rank);
    if (at == ranks_.end() || *at != rank) return std::nullopt;
    return static_cast<int>(at - ranks_.begin());
  }

 private:
  std::vector<int> ranks_;
  bool is_whole_ = false;
};

}  // namespace ringreduce
