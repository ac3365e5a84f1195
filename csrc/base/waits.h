// What this process has waited for other ranks, in all its groups: why it comes late elsewhere.
//
// A rank that waits in one group comes late to the next operation of another.  It tells the ranks
// there since whom (Inherited), and each of them passes that on, so a delay keeps the name of the
// rank where it began, over groups and messages.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/op_signature.h"

namespace ringreduce {

class Waits {
 public:
  static constexpr Nanos kLeast = 200 * kMicrosecond;  // shorter ones are not kept

  // Ranks that meet in operations for which all of them wait, in one group or several.
  struct RankSet {
    RankSet(uint32_t id, std::vector<int> ranks) : id(id), ranks(std::move(ranks)) {}
    const uint32_t id;
    const std::vector<int> ranks;  // by their numbers in errors, ascending
    std::atomic<Nanos> met{0};     // when this rank came to the latest of these operations
    // Itself and those that have all its ranks.  With the mutex held.
    std::vector<std::weak_ptr<RankSet>> around;
  };
  struct Group {
    uint32_t id;
    std::shared_ptr<RankSet> set;
  };
  struct Wait {
    Nanos from, until;
    int32_t rank;       // as in Inherited
    uint32_t sequence;  // of the operation
    uint32_t group;     // of Group
    uint32_t set;       // of its RankSet
    bool in_message;
    // Whether all ranks of the group waited so: then it makes none of them later than the others.
    bool by_all;
  };
  // What a rank tells, and where it waited.
  struct Reason {
    Inherited told;
    uint32_t group = 0;  // twice that of Group, and one more if it was a message
  };

  // Makes process_waits.
  static Waits& makeOfProcess();

  Group makeGroup(std::vector<int> ranks);

  // From any thread.
  void add(const Wait& wait);

  // For an operation of a group that was called at `called`, where the one before it began at
  // `since`: the rank that this process waited for longest between the two, and since it met all of
  // its ranks in a larger group.
  Reason reason(const RankSet& of, Nanos since, Nanos called) const {
    return anySince(since) ? search(of, since, called) : Reason{};
  }
  // The same for a message between two ranks.
  Reason reason(int rank, int peer, Nanos since, Nanos called) const {
    return anySince(since) ? search(rank, peer, since, called) : Reason{};
  }
  bool anySince(Nanos since) const { return latest_.load(std::memory_order_acquire) > since; }

 private:
  using Sets = std::vector<std::weak_ptr<RankSet>>;
  Reason search(const RankSet& of, Nanos since, Nanos called) const;
  Reason search(int rank, int peer, Nanos since, Nanos called) const;
  template <class HasAll>
  Reason searchIn(const Sets& sets, HasAll has_all, Nanos since, Nanos called) const;

  mutable std::mutex mutex_;
  Sets sets_;
  uint32_t last_id_ = 0;
  std::array<Wait, 256> kept_{};
  uint64_t added_ = 0;
  std::atomic<Nanos> latest_{0};  // the end of the latest
};

// Of this process, whose threads may outlive main().
extern Waits& process_waits;

}  // namespace ringreduce
