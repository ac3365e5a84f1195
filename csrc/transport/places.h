// Ring positions: a transport and its collectives number the ranks by their position in the ring of
// hosts (bootstrap/host_ring.h).  Reports of the transport are translated back to ranks.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "transport/wait_guard.h"

namespace ringreduce {

// Each rank's position.
inline std::vector<int> placesOf(const std::vector<int>& ranks) {
  std::vector<int> places(ranks.size());
  for (size_t p = 0; p < ranks.size(); ++p)
    places[static_cast<size_t>(ranks[p])] = static_cast<int>(p);
  return places;
}

class PlacesGuard : public WaitGuard {
 public:
  PlacesGuard(WaitGuard& watch, std::vector<int> ranks) : watch_(watch), ranks_(std::move(ranks)) {}

  bool failed() const override { return watch_.failed(); }
  void poll(int place, Ready ready) override { watch_.poll(rankAt(place), ready); }
  void idle(Ready ready) override { watch_.idle(ready); }
  void verify(int place) override { watch_.verify(rankAt(place)); }
  void verify(int place, const OpSignature& theirs) override {
    watch_.verify(rankAt(place), theirs);
  }
  PeerState stateOf(int place) const override { return watch_.stateOf(rankAt(place)); }
  void broken(int place, const std::string& how) override { watch_.broken(rankAt(place), how); }
  void disagree(int sender, int receiver, uint64_t sent, uint64_t expected) override {
    watch_.disagree(rankAt(sender), rankAt(receiver), sent, expected);
  }

 protected:
  int size() const { return static_cast<int>(ranks_.size()); }
  int rankAt(int place) const { return ranks_[static_cast<size_t>(place)]; }

 private:
  WaitGuard& watch_;
  const std::vector<int> ranks_;
};

}  // namespace ringreduce
