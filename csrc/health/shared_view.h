// The view of ranks that share memory: their own pages, and descriptors that show the end of their
// processes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "health/peer_view.h"
#include "health/pulse.h"

namespace ringreduce {

class SharedView final : public PeerView {
 public:
  // `survives`: the group goes on without lost ranks.
  SharedView(int rank, std::vector<Seat> seats, const GroupOptions& options, bool survives);

  std::vector<int> missing(uint64_t sequence, int waited_for) const override;
  std::vector<int> lostFor(Nanos) const override { return {}; }
  uint64_t progressOf(int rank) const override;
  int waitsFor(int rank) const override { return awaitedMessageOf(rank).peer; }
  uint64_t toCompare(int, uint64_t sequence) const override { return sequence; }
  void announce(const Announcement& call) override;
  void wakeMessenger(int rank) override;
  bool evict(const std::vector<int>& ranks, const std::vector<int>& late, size_t least,
             const std::function<bool()>& over, const std::string& why) override;

 private:
  void look() const override;
  bool isDrained(int, const PeerState& state) const override {
    return state.isLost() || state.declared == Declared::kGone;
  }
  void tellDeparture(Declared how) override;

  std::vector<ProcessFds> processes_;
  std::unique_ptr<Pulse> pulse_;
};

}  // namespace ringreduce
