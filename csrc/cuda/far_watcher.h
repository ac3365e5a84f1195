// Who looks after a rank's operations between hosts: deadlines, NCCL's errors, one story for all.
//
// Hosts share no memory, so there is no comparing of every operation as within a host (watcher.h):
// that would cost a message each.  Ranks meet in the store instead, and only when something takes
// long: a rank whose oldest operation has waited for a second writes there how far it has come, and
// again each second, reads what the others wrote, and whether the group has failed.  So a timeout
// names who has not come, a disagreement is found where it makes ranks wait, and what ended the
// group at one rank is told by all.  What nobody can know is said to be unknown: NCCL tells that a
// rank is gone, but not which.
//
// Three threads, which sleep while nothing is under way: one asks whether operations are done,
// which may take as long as CUDA likes; one writes to the store, which may take as long as a
// network likes; one looks after deadlines and waits for neither.
//
// It knows no CUDA and no NCCL, so it is tested without them.
#pragma once

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
#include "base/error.h"
#include "bootstrap/hosts.h"
#include "bootstrap/options.h"
#include "bootstrap/store.h"
#include "transport/shm/page.h"

namespace ringreduce::cuda {

// Why a group can go on no more.
struct FarTrouble {
  Failure kind;
  std::string text;
  bool guessed = false;  // somebody else may know better, and is given time to say so
};

struct FarOptions {
  // Asked often, while something is under way: whether NCCL has failed, or the group of this host.
  std::function<std::optional<FarTrouble>()> probe = [] { return std::nullopt; };
  // Called once when the group has failed: ends everything that still waits.
  std::function<void(const std::string& why)> let_go = [](const std::string&) {};
  Nanos word_after = kSecond;  // a wait this long is told in the store, and each time as long again
};

class FarWatcher {
 public:
  // Whether a stream has come to an operation's begin, or to its end.  Throws Error if the GPU has
  // failed.
  using Reached = std::function<bool()>;

  // The store is used by a thread until this is gone.
  FarWatcher(std::shared_ptr<Store> store, const Hosts& hosts, const GroupOptions& options,
             FarOptions far);
  ~FarWatcher();
  FarWatcher(const FarWatcher&) = delete;
  FarWatcher& operator=(const FarWatcher&) = delete;

  // The next operation; returns its number.  Throws the group's error.
  uint64_t announce(OpSignature what);
  // The one announced last goes into its stream.  Its time counts from when its stream has begun
  // it.
  void entrust(uint64_t number, Nanos timeout, Reached begun, Reached finished);
  // From now on operations may run that no host is told of (a CUDA graph's): never sleep for long.
  void stayAwake();

  void check() const;  // throws the group's error, if there is one by now
  bool failed() const;
  // Waits until all that was entrusted is done; false if `longest` goes by first.  Throws; Ctrl-C
  // fails the group.
  bool wait(Nanos longest);
  bool settle(Nanos longest);  // the same for destructors: does not throw
  void abort(const std::string& why);
  // Ends the group for all ranks, unless it has ended already, and throws its error.
  [[noreturn]] void fail(Failure kind, int culprit, const std::string& text);

 private:
  struct Verdict {
    Failure kind = Failure::kAborted;
    int culprit = 0, reporter = 0;
    std::string text;
    bool guessed = false;
  };
  struct Operation {
    uint64_t number;
    OpSignature what;
    Nanos timeout;
    Reached begun, finished;
  };
  // How far a rank has come, as it wrote itself.
  struct Word {
    uint64_t announced = 0;  // operations
    uint64_t head = 0;       // the oldest that is not done
    uint64_t history = 0;    // of all operations up to that one
    bool begun = false;      // its stream has come to it
    std::string what;
  };
  using Lock = std::unique_lock<std::mutex>;

  void collect();
  void look();
  void correspond();

  void propose(Lock& lock, Verdict mine);
  void settleVerdict(Lock& lock);
  void hearVerdict(Lock& lock);
  void exchangeWords(Lock& lock);
  void lookAtHead(Lock& lock);
  Verdict late(const Operation& head) const;
  void pause(Lock& lock, Nanos time);
  [[noreturn]] void throwVerdict() const;
  std::string shown(int rank) const { return "rank " + options_.shown(rank); }
  std::string key(const std::string& name) const;

  const std::shared_ptr<Store> store_;
  const Hosts hosts_;
  const GroupOptions options_;
  const FarOptions far_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Operation> under_way_;
  uint64_t announced_ = 0, history_ = 0;
  OpSignature latest_;
  Nanos head_since_ = 0, begun_since_ = 0;  // the oldest operation's; 0: not yet
  Nanos next_report_ = 0;
  std::vector<Word> words_;  // by rank, as last read
  bool heard_ = false;       // the store gave them
  bool roll_call_ = false;   // they are wanted now
  bool wrote_ = false;       // there is a word of ours in the store
  std::optional<Verdict> proposed_, verdict_;
  bool let_go_ = false, awake_ = false, stopping_ = false;
  std::thread collecting_, looking_, corresponding_;
};

}  // namespace ringreduce::cuda
