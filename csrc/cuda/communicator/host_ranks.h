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

// A rank may be this many operations ahead of another, and every mismatch is still found before the
// slower rank trusts its results: four times the launches, about a thousand, that CUDA lets a host
// queue in a stream before it makes the host wait.
inline constexpr uint64_t kRemembered = 4096;

// An announcement that may be read while it is replaced.  Its reader must check the owner's
// progress afterwards.
class Announced {
 public:
  void set(const OpSignature& what) {
    uint64_t words[kWords];
    std::memcpy(words, &what, sizeof what);
    // Releases: a reader that sees a new word also sees the counter that was published before it.
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

// A rank's page of host memory that all ranks map and all GPUs reach: hosts read and write it while
// kernels run and streams wait, without a CUDA call.  It holds the words that streams wait for, so
// that a host can release them, the failures of kernels, and the announcements that hosts compare.
// Flags between GPUs lie in device memory (device_layout.h).
struct HostState {
  // Set by any rank's host once the group has failed: the owner's kernels stop waiting and writing,
  // and its outputs are poisoned.
  AbortFlag abort;

  // The owner's stream sets it to 1 when a direct schedule begins and to 0 when it ends;
  // `delivered` counts the pieces that came to their end.  Replayed CUDA graphs do so too, so their
  // deadlines are kept as well.
  alignas(kLine) uint32_t busy;
  alignas(kLine) uint64_t delivered;

  Trouble trouble;  // written by the owner's kernels

  // The owner's stream waits for these (direct_schedule.h), at wordIndex: other ranks set them, and
  // it takes them back.
  StreamWord words[kHalves * 2 * kMostRanks];
  // Where the owner's tensors are; its `ready` words tell the place in this list.
  Location told[kMostTold];

  // The number of the owner's calls, and of those that have left its streams and no longer touch
  // memory of other ranks.
  Flag announced, finished;
  Announced announcements[kRemembered];
  StreamArrival arrivals[kRemembered];  // of the same operations
};

// The list HostState::told, for the rank that writes it.
class ToldLocations {
 public:
  explicit ToldLocations(HostState& own, uint32_t most = kMostTold) : own_(own), most_(most) {}

  // What the call of this number sets its `ready` words to.  If the list is full, its tensors are
  // taken to be in the half, and `where` is changed to that.  `captured`: by a CUDA graph, which
  // may tell it at any time.
  uint32_t tell(Location& where, uint64_t number, bool captured);

 private:
  struct Use {
    uint64_t last;  // the number of the last call that told it
    bool captured;
  };
  HostState& own_;
  const uint32_t most_;
  std::vector<Use> uses_ = {};  // by place
};

// Each rank publishes its progress in its page, so every operation is compared and the progress is
// always exact.
class HostRanks final : public WatchedRanks {
 public:
  // `states` by rank.  Both halves of this rank are free now.
  HostRanks(const Group& group, std::vector<HostState*> states);

  void announce(const OpSignature& what) override;
  void advance(uint64_t finished, const Operations& under_way) override;
  void arrive(uint64_t number, const StreamArrival& arrival) override;
  StreamArrival arrivalOf(int rank, uint64_t number) const override;
  uint64_t announcedBy(int rank) const override { return state(rank).announced.observe(); }
  bool mayHaveCome(int rank, uint64_t number) const override { return announcedBy(rank) > number; }
  // Replays of graphs are not counted: what it reads of them, its `free` tells.
  bool isDone(int rank, uint64_t operations) const override;
  std::optional<Difference> findDifference(const Operations& under_way) override;
  std::optional<Late> findLate(const Operations& under_way) override;
  Finding blameForDelay(const OpSignature& what, int waited_for) const override;
  Nanos lossPatience(bool came) const override;
  void release() override;

 private:
  HostState& state(int rank) const { return *states_[static_cast<size_t>(rank)]; }
  HostState& own() const { return state(group_.rank()); }
  // A word that this rank waits for and `setter` sets.
  uint32_t& wordOf(Word word, int half, int setter) const {
    return own().words[wordIndex(word, half, setter, group_.size())].word;
  }
  OpSignature announcementOf(int rank, uint64_t number) const {
    return state(rank).announcements[number % kRemembered].get();
  }
  std::optional<Late> lateKernel(const Operations& under_way) const;
  std::optional<Late> lateStream(const Operations& under_way);
  int missingWord(const OpSignature& what) const;

  const Group& group_;
  const std::shared_ptr<Epoch> epoch_ = group_.epoch();
  const std::vector<HostState*> states_;
  std::vector<uint64_t> compared_;  // by rank: operations found equal
  // HostState::delivered and busy as last seen, and since when they have not changed.
  uint64_t delivered_ = 0;
  bool was_busy_ = false;
  Nanos delivered_since_ = 0;
};

}  // namespace ringreduce::cuda
