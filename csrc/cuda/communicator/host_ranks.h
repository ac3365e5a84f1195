// The ranks of one host, for the watchdog, and the page of host memory by which it knows them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cuda/communicator/watchdog.h"
#include "cuda/kernels/direct_schedule.h"
#include "cuda/kernels/kernel_call.h"
#include "transport/shm/page.h"

namespace ringreduce::cuda {

// ----
//
// A rank's page of host memory that all ranks map and all GPUs reach: what a host must be able to
// read and write while kernels run and streams wait, without a CUDA call.
//
// Flags between GPUs lie in device memory (device_layout.h).  Here lie the words that streams wait
// for, so that a host can release them; what kernels say of their failure; and what the ranks
// announce, which their hosts compare.

// How many operations a rank may be ahead of another so that every mismatch is still found before
// the slower rank trusts its results: four times the launches, about a thousand, that CUDA lets a
// host queue in a stream before it makes it wait.
inline constexpr uint64_t kRemembered = 4096;

// An announcement that may be read while it is replaced: its reader must check afterwards how far
// its owner has come.
class Announced {
 public:
  void set(const OpSignature& what) {
    uint64_t words[kWords];
    std::memcpy(words, &what, sizeof what);
    // Each store comes after the counter's that came before: an old counter never goes with new
    // words.
    for (size_t i = 0; i < kWords; ++i)
      std::atomic_ref(words_[i]).store(words[i], std::memory_order_release);
  }
  OpSignature get() {
    uint64_t words[kWords];
    for (size_t i = 0; i < kWords; ++i)
      words[i] = std::atomic_ref(words_[i]).load(std::memory_order_acquire);
    OpSignature what;
    std::memcpy(static_cast<void*>(&what), words, sizeof what);
    return what;
  }

 private:
  static constexpr size_t kWords = sizeof(OpSignature) / sizeof(uint64_t);
  static_assert(kWords * sizeof(uint64_t) == sizeof(OpSignature));
  uint64_t words_[kWords];
};

struct HostState {
  // Set by any rank's host once the group has failed: the owner's kernels stop waiting and write no
  // more, its outputs are poisoned.
  alignas(kLine) uint64_t abort;

  // Set to 1 by the owner's stream when a direct schedule begins and to 0 when it ends; `delivered`
  // counts their ends.  A replayed CUDA graph moves both, so its deadlines are kept as well.
  alignas(kLine) uint32_t busy;
  alignas(kLine) uint64_t delivered;

  Trouble trouble;  // written by the owner's kernels

  // What the owner's stream waits for (direct_schedule.h), at wordIndex: set by others, taken back
  // by it.
  struct alignas(kLine) Line {
    uint32_t word;
  };
  Line words[2 * kMostRanks];

  // The owner's calls, in their order, and how many of them have left its streams: from then on
  // they touch no memory of other ranks.
  Flag announced, finished;
  Announced announcements[kRemembered];
};

// Streams wait until (int32)(word - 1) >= 0.  This releases such a wait, and cannot be mistaken for
// what ranks set.
inline constexpr uint32_t kReleased = uint32_t{1} << 30;
static_assert(static_cast<int32_t>(kReleased - 1) >= 0);

// ----
//
// The ranks of one host, for the watchdog: each rank publishes its progress in a page of memory
// that all ranks map (host_ranks.h), so every operation is compared and the progress is always
// exact.

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
