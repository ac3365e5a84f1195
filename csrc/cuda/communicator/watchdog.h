// The watchdog of a rank's GPU operations: deadlines, lost ranks, mismatches.
//
// A host that has put work into a stream goes on, so two threads look after that work.  They sleep
// while there is none.  One asks CUDA whether operations are done: often while a user's thread
// waits for them, else every few milliseconds.  The other checks deadlines, lost ranks and
// mismatches every few milliseconds, fails the group with an error that names the rank, and then
// ends everything that still waits.  It makes no call that could wait for the GPU, except to end a
// group that has failed; for that, each communicator has its own two.
//
// The group knows which ranks are alive, and keeps the one error of all ranks (group/group.h).
// WatchedRanks knows the progress of the other ranks.  It has one implementation for ranks that
// share memory (host_ranks.h) and one for ranks of several hosts (remote_ranks.h).
//
// It makes no CUDA call itself, so it is tested without a GPU.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/wait_clock.h"
#include "epoch/rank_map.h"
#include "epoch/recorder.h"
#include "group/group.h"

namespace ringreduce::cuda {

// An operation that this rank has put into a stream.
struct StreamOperation {
  // Whether the stream has reached a point.  Throws Error if the GPU has failed.
  using Reached = std::function<bool()>;
  // As in gpu_communicator.h.  Does not throw, and must not call the watchdog.
  using Label = std::function<std::string()>;

  OpSignature what;  // its sequence is the operation's number
  Nanos timeout = 0;
  Reached begun, finished;  // `begun` may be null
  Label label;
  Nanos begun_at = 0;
  // Of its record, in CLOCK_MONOTONIC: when it was tracked, and when it was seen to have begun, at
  // most `error` after it had; 0: it has not, or nothing tells.
  Nanos posted = 0, arrived = 0, error = 0;
  Nanos done = 0;  // seen to have ended
  bool failed = false;
  uint32_t step = 0, bucket = 0;
};

// When a rank's stream came to an operation, in CLOCK_MONOTONIC of its host: `error` before that
// at the most.
struct StreamArrival {
  Nanos at = 0;  // 0: it is not known yet; kNever: it will not be
  Nanos error = 0;
};

// The other ranks, as the watchdog sees them, and the waits that it can end.
class WatchedRanks {
 public:
  using Operations = std::deque<StreamOperation>;  // of this rank, unfinished, the oldest first
  struct Difference {
    int rank;
    OpSignature ours, theirs;
  };
  struct Late {
    OpSignature what;
    Nanos timeout;
    int waited_for = -1;     // the rank whose part is missing, if known
    std::string where = {};  // " (channel 2, step 7)"
  };

  virtual ~WatchedRanks() = default;

  // The watchdog holds its lock during these calls.  None of them waits.

  // Publishes that this rank announces an operation, and how far its streams are: `finished` is the
  // number of operations that have left them.
  virtual void announce(const OpSignature& what) = 0;
  virtual void advance(uint64_t finished, const Operations& under_way) = 0;
  // Publishes when this rank's stream came to an operation.
  virtual void arrive(uint64_t number, const StreamArrival& arrival) = 0;

  // The number of operations announced by that rank; ~0 if it is not known.
  virtual uint64_t announcedBy(int rank) const = 0;
  // Whether a rank that is lost now may have announced the operation of this number.
  virtual bool mayHaveCome(int rank, uint64_t number) const = 0;
  // When that rank's stream came to the operation of this number.
  virtual StreamArrival arrivalOf(int rank, uint64_t number) const = 0;
  // Whether that rank's first `operations` no longer use this rank's memory.
  virtual bool isDone(int rank, uint64_t operations) const = 0;

  // An operation that another rank announced differently.
  virtual std::optional<Difference> findDifference(const Operations& under_way) = 0;
  // An operation whose deadline has passed.
  virtual std::optional<Late> findLate(const Operations& under_way) = 0;
  // Of an operation that is late, though all ranks have come to it and none is stopped.
  virtual Finding blameForDelay(const OpSignature& what, int waited_for) const = 0;
  // How long to wait after a rank was lost: the operation may still complete.  `came`: whether that
  // rank may have announced it.
  virtual Nanos lossPatience(bool came) const = 0;

  // Called again and again once the group has failed, until nothing is under way: ends waits.
  virtual void release() = 0;

  // These two are called in the watchdog's thread without the lock.

  // Checks for failures besides lost ranks; called often while something is under way.
  virtual void probe() {}
  // Called once when the group has failed.  May wait.
  virtual void abort(const std::string& why) { (void)why; }
};

class Watchdog {
 public:
  using Reached = StreamOperation::Reached;
  using Label = StreamOperation::Label;

  Watchdog(Group& group, std::unique_ptr<WatchedRanks> ranks);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  // Announces the next operation to the other ranks and returns its number.  Throws the group's
  // error.
  uint64_t announce(OpSignature what);
  // The operation that was announced last is in its stream, or will be.
  void track(Nanos timeout, Reached finished, Label label = {}, Reached begun = {});
  // From now on operations may run that no host is told of (a CUDA graph's): never sleep for long.
  void stayAwake();

  // The records from index `since` on, as Recorder's; then those of operations that are not over,
  // or of which it is not yet known when the other ranks came.
  std::vector<OpRecord> records(uint64_t since);
  // As Recorder::addTo.
  void addTo(Totals& totals);
  // Whether somebody reads the records or their sums again and again: then it is worth an event for
  // each operation to know when it begins.
  bool isFollowed() const { return monotonicNow() - read_at_ < kFollowed; }

  // Throws the group's error, if there is one by now.
  void check();
  // Waits, in a user's thread, until all operations are done; returns false after `longest`.
  // Throws; Ctrl-C fails the group.
  bool wait(Nanos longest);
  // For destructors: waits until this rank's operations are done, and then until no operation of a
  // remaining rank uses this rank's memory.  Does not throw; returns false after `longest`.
  bool settle(Nanos longest);
  void abort(const std::string& why);

 private:
  using Lock = std::unique_lock<std::mutex>;
  static constexpr Nanos kFollowed = 3 * kSecond;  // sums are read each second

  void stop();
  void watch();
  void collect();
  void giveUp(const std::string& why);
  void look();
  void compare();
  void checkDeadlines();
  void checkPresence();
  void reportStall(Nanos time);
  // Since the oldest operation became the oldest; the deadlines are those of the operations.
  WaitClock headClock() const { return {kNever, group_.options().stall}; }
  void release();
  bool hasToAbort() const { return !aborted_ && group_.failed(); }
  bool pauseUntil(Lock& lock, Nanos deadline);
  bool isAwaited() const;
  Finding blame(const OpSignature& what, int waited_for) const;
  std::string labelOf(uint64_t number) const;
  OpRecord recordOf(const StreamOperation& operation) const;
  void end(StreamOperation operation, bool failed);
  bool isTold(const StreamOperation& operation) const;
  void closeEnded();
  void close(const StreamOperation& operation);

  Group& group_;
  const std::shared_ptr<Epoch> epoch_ = group_.epoch();
  const std::unique_ptr<WatchedRanks> ranks_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;  // an operation was added or has ended, or the group has
  WatchedRanks::Operations under_way_;
  WatchedRanks::Operations ended_;  // without a record yet
  OpSignature latest_;
  uint64_t announced_ = 0, finished_ = 0, history_ = 0;
  WaitClock head_{headClock()};
  Nanos awaited_at_ = 0;  // when a user's thread last waited
  Nanos next_roll_call_ = 0, next_probe_ = 0, lost_since_ = 0;
  bool awake_ = false, aborted_ = false, stopping_ = false;
  Recorder records_{Recorder::OfMessages{}, group_.recorder()};
  const RankMap all_{{}, group_.size()};
  std::atomic<Nanos> read_at_{-kFollowed};  // when records or sums were read last
  Nanos looked_at_ = 0, ended_at_ = 0;      // the oldest had not begun; the one before it ended
  uint32_t step_ = 0, bucket_ = 0;
  std::thread watching_, collecting_;
};

}  // namespace ringreduce::cuda
