// A mesh whose ranks stand in another order than that of their numbers (group/ring.h): it knows
// them by their places in the ring, and so do the collectives on it, which go from each place to
// the next.  What calls have by rank is put in order by place before they run, and what the mesh
// says of places is told of ranks.
#pragma once

#include <utility>
#include <vector>

#include "group/operation.h"
#include "wire/watch.h"

namespace ringreduce {

// By rank: its place.
std::vector<int> placesOf(const std::vector<int>& ranks);

// The same call as the mesh is to see it.  What `operation` holds must live as long.
Operation inPlaces(const Operation& operation, const std::vector<int>& ranks);

class PlacesWatch : public Watch {
 public:
  PlacesWatch(Watch& watch, std::vector<int> ranks) : watch_(watch), ranks_(std::move(ranks)) {}

  bool failed() const override { return watch_.failed(); }
  void poll(int place, Ready ready) override { watch_.poll(rankAt(place), ready); }
  void idle(Ready ready) override { watch_.idle(ready); }
  void verify(int place) override { watch_.verify(rankAt(place)); }
  void verify(int place, const Announcement& theirs) override {
    watch_.verify(rankAt(place), theirs);
  }
  Fate fateOf(int place) const override { return watch_.fateOf(rankAt(place)); }
  void broken(int place, const std::string& how) override { watch_.broken(rankAt(place), how); }
  void disagree(int sender, int receiver, uint64_t sent, uint64_t expected) override {
    watch_.disagree(rankAt(sender), rankAt(receiver), sent, expected);
  }

 protected:
  int size() const { return static_cast<int>(ranks_.size()); }
  int rankAt(int place) const { return ranks_[static_cast<size_t>(place)]; }

 private:
  Watch& watch_;
  const std::vector<int> ranks_;
};

}  // namespace ringreduce
