// The ranks of one host, for the watchdog: each rank publishes its progress in a page of memory
// that all ranks map (host_state.h), so every operation is compared and the progress is always
// exact.
#pragma once

#include <vector>

#include "cuda/host_state.h"
#include "cuda/watchdog.h"

namespace ringreduce::cuda {

class HostRanks final : public WatchedRanks {
 public:
  // `states` by rank.
  HostRanks(const Group& group, std::vector<HostState*> states);

  void announce(const OpSignature& what) override;
  void advance(uint64_t finished, const Operations& under_way) override;
  uint64_t announcedBy(int rank) const override { return state(rank).announced.observe(); }
  bool mayHaveCome(int rank, uint64_t number) const override { return announcedBy(rank) > number; }
  bool isDone(int rank, uint64_t operations) const override {
    return state(rank).finished.observe() >= operations;
  }
  std::optional<Difference> findDifference(const Operations& under_way) override;
  std::optional<Late> findLate(const Operations& under_way) override;
  Blame blameForDelay(const OpSignature& what, int waited_for) const override;
  Nanos lossPatience(bool came) const override;
  void release() override;

 private:
  HostState& state(int rank) const { return *states_[static_cast<size_t>(rank)]; }
  HostState& own() const { return state(group_.rank()); }
  OpSignature announcementOf(int rank, uint64_t number) const {
    return state(rank).announcements[number % kRemembered].get();
  }
  std::optional<Late> lateKernel(const Operations& under_way) const;
  std::optional<Late> lateStream(const Operations& under_way);
  int missingWord(const OpSignature& what) const;

  const Group& group_;
  const std::vector<HostState*> states_;
  std::vector<uint64_t> compared_;  // by rank: operations found to be the same as ours
  // HostState::delivered and busy as last seen, and since when they have not changed.
  uint64_t delivered_ = 0;
  bool was_busy_ = false;
  Nanos delivered_since_ = 0;
};

}  // namespace ringreduce::cuda
