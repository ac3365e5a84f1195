// The ranks of several hosts, for the watchdog: they share no memory, so comparing every operation
// would cost a message each.  Ranks exchange their progress through the control ring of the group,
// and only while an operation takes long.  A deadline therefore names the ranks that did not come,
// a mismatch is found where it makes ranks wait, and lost ranks are known from the group itself.
//
// Ranks detect the same failure at the same time.  To give all ranks the same error, each waits a
// little before it reports, a time of its own: the first report reaches the others meanwhile.
#pragma once

#include <atomic>
#include <functional>
#include <string>

#include "cuda/communicator/watchdog.h"

namespace ringreduce::cuda {

class RemoteRanks final : public WatchedRanks {
 public:
  struct Hooks {
    // NCCL's error, or "".  NCCL does not say which rank.
    std::function<std::string()> transport_error = [] { return std::string(); };
    // Fails the group if that of this host has failed.
    std::function<void()> check_host = [] {};
    std::function<void()> poison = [] {};  // does not wait
    std::function<void(const std::string& why)> end_waits = [](const std::string&) {};  // may wait
  };
  RemoteRanks(Group& group, Hooks hooks) : group_(group), hooks_(std::move(hooks)) {}

  void announce(const OpSignature& what) override;
  void advance(uint64_t finished, const Operations& under_way) override;
  // Not told: it would cost a message for each operation.
  void arrive(uint64_t, const StreamArrival&) override {}
  StreamArrival arrivalOf(int, uint64_t) const override { return {.at = kNever}; }
  uint64_t announcedBy(int rank) const override;
  bool mayHaveCome(int, uint64_t) const override { return true; }
  // Ranks of other hosts map none of this rank's memory.
  bool isDone(int, uint64_t) const override { return true; }
  std::optional<Difference> findDifference(const Operations& under_way) override;
  std::optional<Late> findLate(const Operations& under_way) override;
  Finding blameForDelay(const OpSignature& what, int waited_for) const override;
  Nanos lossPatience(bool came) const override;
  void release() override { hooks_.poison(); }
  void probe() override;
  void abort(const std::string& why) override;

 private:
  Nanos turn() const;
  Nanos askAfter() const;

  Group& group_;
  const std::shared_ptr<Epoch> epoch_ = group_.epoch();
  const Hooks hooks_;
  StreamProgress own_;
  Nanos next_question_ = 0;
  // The question before a timeout: for which operation, and when.
  uint64_t asked_for_ = kNoOperation;
  Nanos asked_at_ = 0;
  Nanos differs_since_ = 0;              // when a difference was found
  std::atomic<Nanos> broken_since_ = 0;  // when NCCL first reported an error
};

}  // namespace ringreduce::cuda
