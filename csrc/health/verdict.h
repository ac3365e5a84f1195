// Why a group has failed: one word, the failure of its first cause.
//
// The rank that finds the cause writes the text into its own page, and then sets the word by
// compare-and-swap.  A rank that fails later finds the word set.  So a rank that leaves after an
// error is never blamed for it, and a rank that is killed while it reports leaves no partial
// failure.  Between hosts each rank has a word of its own and keeps the first failure that it
// receives; if two are found at the same time, ranks may raise different ones.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>

#include "base/error.h"
#include "health/peer_view.h"

namespace ringreduce {

class Verdict {
 public:
  explicit Verdict(const PeerView& peers) : peers_(peers) {}

  // Of the ranks in the word, which has 24 bits for each; as the culprit it is kNobody.
  static constexpr int kLargestRank = 0xffffff;

  // Sequentially consistent: a rank looks here between setting its wake word and sleeping.
  bool exists() const { return word().load(std::memory_order_seq_cst) != 0; }
  Failure kind() const { return static_cast<Failure>(value() >> 48); }
  int culprit() const {
    const auto rank = static_cast<int>(value() >> 24) & kLargestRank;
    return rank == kLargestRank ? kNobody : rank;
  }
  int reporter() const { return static_cast<int>(value() & kLargestRank); }
  std::string text() const { return peers_.page(reporter()).failure_text; }

  // The first cause wins.  True if no thread of this rank had found one before; another rank may
  // still have set the word first.
  bool decide(const GroupFailure& failure) {
    if (exists()) return false;
    // One thread of this rank at a time; the others find the word set.
    const std::lock_guard lock(mutex_);
    if (exists()) return false;
    RankPage& reporters = peers_.page(failure.reporter);
    std::strncpy(reporters.failure_text, failure.text.c_str(), sizeof reporters.failure_text - 1);
    uint64_t none = 0;
    word().compare_exchange_strong(none, pack(failure), std::memory_order_seq_cst);
    return true;
  }

 private:
  static constexpr uint64_t pack(const GroupFailure& failure) {
    return static_cast<uint64_t>(failure.kind) << 48 |
           static_cast<uint64_t>(failure.culprit & kLargestRank) << 24 |
           static_cast<uint64_t>(failure.reporter);
  }
  std::atomic_ref<uint64_t> word() const { return std::atomic_ref(peers_.page(0).failure); }
  uint64_t value() const { return word().load(std::memory_order_acquire); }

  const PeerView& peers_;
  std::mutex mutex_;
};

}  // namespace ringreduce
