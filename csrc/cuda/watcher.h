// Who looks after a rank's GPU work once it is in a stream: deadlines, dead ranks, disagreements.
//
// A host that has put work into a stream is free to do something else, so there are two threads.
// They sleep while nothing is under way.  While something is, one asks whether it is done; the
// other looks every few milliseconds for what the GPU cannot tell by itself, ends the group with an
// error that names the rank, and then lets go of everything that still waits: kernels by the abort
// word, streams by releasing the words they wait for, again and again until the last operation has
// left its stream, since a peer's write that was already queued may take a release back.  The
// second calls nothing that could wait for the GPU.
//
// It knows no CUDA: an operation is a number, what it is, and a function that says whether it is
// done.  So it is tested without a GPU.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "cuda/host_state.h"
#include "group/group.h"

namespace ringreduce::cuda {

class Watcher {
 public:
  // Whether an operation has left its stream.  Throws Error if the GPU has failed.
  using Finished = std::function<bool()>;
  // What stands in parentheses behind errors about an operation (plane.h).  May be null; does not
  // throw, and calls nothing here.
  using Label = std::function<std::string()>;

  // `states` by rank.  It writes to its own, and tells the others to give up when the group has
  // failed.
  Watcher(Group& group, std::vector<HostState*> states);
  ~Watcher();
  Watcher(const Watcher&) = delete;
  Watcher& operator=(const Watcher&) = delete;

  // The next operation: announces it to the others and returns its number.  Throws the group's
  // error.
  uint64_t announce(OpSignature what);
  // It is in its stream.
  void entrust(uint64_t number, Nanos timeout, Finished finished, Label label = {});
  // From now on operations may run that no host is told of (a CUDA graph's): never sleep for long.
  void stayAwake();

  // Throws the group's error, if there is one by now.
  void check();
  // Waits, in a user's thread, until all that was entrusted is done; false if `longest` goes by
  // first. Throws; Ctrl-C fails the group.
  bool wait(Nanos longest);
  // For destructors: waits until what was entrusted here is done, and then until every rank that is
  // still there is done with the same operations, so that none of them touches this rank's memory
  // any more.  Does not throw; false if `longest` went by first.
  bool settle(Nanos longest);
  void abort(const std::string& why);

 private:
  struct Operation {
    uint64_t number;
    OpSignature what;
    Nanos timeout;
    Finished finished;
    Label label;
  };

  HostState& own() const { return *states_[static_cast<size_t>(group_.rank())]; }
  void watch();
  void collect();
  void giveUp(const std::string& why);
  void look();
  void letGo();
  bool pauseUntil(std::unique_lock<std::mutex>& lock, Nanos deadline);
  void compare();
  void blameKernel();
  void blameAbsent();
  void blameStream();
  [[noreturn]] void timedOut(const OpSignature& what, Nanos timeout, int waited_for,
                             const std::string& where);
  std::string laggards(uint64_t number, int waited_for, int& culprit) const;
  bool hasAnnounced(int r, uint64_t number) const;
  OpSignature announcementOf(int r, uint64_t number) const;
  std::string labelOf(uint64_t number) const;
  int missingWord(const OpSignature& what) const;

  Group& group_;
  const std::vector<HostState*> states_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;  // something was entrusted, or has ended
  std::deque<Operation> under_way_;
  uint64_t announced_ = 0, history_ = 0;
  std::vector<uint64_t> compared_;  // by rank: operations found to be the same as ours
  Nanos head_since_ = 0;            // when the oldest operation became the oldest
  Nanos next_report_ = 0, next_roll_call_ = 0, missed_since_ = 0;
  uint64_t delivered_ = 0;  // as last seen, and since when it has stood still
  bool was_busy_ = false;
  Nanos delivered_since_ = 0;
  bool awake_ = false, stopping_ = false;
  std::thread watching_, collecting_;
};

}  // namespace ringreduce::cuda
