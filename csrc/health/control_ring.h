// The neighbours of each rank in the control ring, and the ranks that can still be reached: pure
// functions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"

namespace ringreduce::net {

class ControlRing {
 public:
  // `order` holds each rank once; empty: 0, 1, ... size - 1.
  ControlRing(int size, std::vector<int> order);

  void remove(int rank);  // it has left, or ended
  bool has(int rank) const { return here_[static_cast<size_t>(rank)]; }

  // The first remaining rank after or before `rank`, which may itself have been removed; `rank` if
  // none remains.
  int next(int rank) const { return beside(rank, 1); }
  int previous(int rank) const { return beside(rank, -1); }

  // The remaining ranks that `me` cannot reach any more.  The ring is cut between two neighbours if
  // they are a pair of `cuts`.  `linked`: ranks that `me` has connections with.  Ranks that were
  // removed do not count, in either list.
  using Cuts = std::set<std::pair<int, int>>;  // the smaller rank first
  std::vector<int> beyond(int me, const Cuts& cuts, const std::vector<int>& linked) const;

 private:
  int beside(int rank, int step) const;

  std::vector<int> order_, place_;
  std::vector<bool> here_;
};

inline ControlRing::ControlRing(int size, std::vector<int> order)
    : order_(std::move(order)),
      place_(static_cast<size_t>(size), -1),
      here_(static_cast<size_t>(size), true) {
  if (order_.empty()) {
    order_.resize(static_cast<size_t>(size));
    std::iota(order_.begin(), order_.end(), 0);
  }
  bool fits = order_.size() == place_.size();
  for (size_t i = 0; fits && i < order_.size(); ++i) {
    const int rank = order_[i];
    fits = rank >= 0 && rank < size && place_[static_cast<size_t>(rank)] < 0;
    if (fits) place_[static_cast<size_t>(rank)] = static_cast<int>(i);
  }
  if (!fits)
    throw Error(Failure::kSetup, "the control ring of " + std::to_string(size) +
                                     " ranks must name each of them once");
}

inline void ControlRing::remove(int rank) {
  here_[static_cast<size_t>(rank)] = false;
}

inline int ControlRing::beside(int rank, int step) const {
  const int size = static_cast<int>(order_.size());
  for (int i = 1; i < size; ++i) {
    const int place = (place_[static_cast<size_t>(rank)] + i * step % size + size) % size;
    const int other = order_[static_cast<size_t>(place)];
    if (has(other)) return other;
  }
  return rank;
}

inline std::vector<int> ControlRing::beyond(int me, const Cuts& cuts,
                                            const std::vector<int>& linked) const {
  std::vector<bool> reached(order_.size());
  std::vector<int> from = linked;
  from.push_back(me);
  for (int start : from) {
    if (!has(start)) continue;  // it was removed
    for (int step : {1, -1}) {
      int at = start;
      for (size_t i = 0; i < order_.size(); ++i) {
        reached[static_cast<size_t>(at)] = true;
        const int other = beside(at, step);
        if (other == start || cuts.contains(std::minmax(at, other))) break;
        at = other;
      }
    }
  }
  std::vector<int> ranks;
  for (size_t r = 0; r < reached.size(); ++r)
    if (here_[r] && !reached[r]) ranks.push_back(static_cast<int>(r));
  return ranks;
}

}  // namespace ringreduce::net
