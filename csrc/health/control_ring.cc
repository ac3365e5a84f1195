// Walks around the ring.
#include "health/control_ring.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "base/error.h"

namespace ringreduce::net {

ControlRing::ControlRing(int size, std::vector<int> order)
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

void ControlRing::remove(int rank) {
  here_[static_cast<size_t>(rank)] = false;
}

int ControlRing::beside(int rank, int step) const {
  const int size = static_cast<int>(order_.size());
  for (int i = 1; i < size; ++i) {
    const int place = (place_[static_cast<size_t>(rank)] + i * step % size + size) % size;
    const int other = order_[static_cast<size_t>(place)];
    if (has(other)) return other;
  }
  return rank;
}

std::vector<int> ControlRing::beyond(int me, const Cuts& cuts,
                                     const std::vector<int>& linked) const {
  std::vector<bool> reached(order_.size());
  std::vector<int> from = linked;
  from.push_back(me);
  for (int start : from) {
    if (!has(start)) continue;  // a way to one that stands here no more leads nowhere
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
