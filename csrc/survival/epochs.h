// The epochs of a group: the current one, and during a recovery those that may follow it.
//
// A rank that is here in any of them is here: it leaves the older ones as it goes on, and a newer
// one if it cannot make it.  What survives an epoch is here too: who was lost in it, to which ranks
// messages may have been lost with it, and why there is no next one.
//
// Thread-safe.  Only the thread that runs the group's operations adds epochs.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "bootstrap/options.h"
#include "epoch/epoch.h"
#include "epoch/operation.h"

namespace ringreduce {

// What this rank knows of another.
enum class Sight : uint8_t {
  kHere,
  kSilent,  // it cannot be reached, but may live
  kEnded,   // its process has ended, or it has left
};

class Epochs {
 public:
  // Of a group of that size, in which this rank has that number.  `options`: the group's, which
  // outlive this object, as `messages` does, where the records of messages go.
  Epochs(int rank, int size, const GroupOptions& options, std::shared_ptr<Epoch> first,
         Recorder& messages);

  const GroupOptions& options() const { return options_; }
  int rank() const { return rank_; }
  int size() const { return size_; }

  std::shared_ptr<Epoch> current() const;
  // The same without a lock, for the thread that runs operations.
  Epoch& running() { return *current_; }

  // Runs the operation, whose ranks are the group's, in the current epoch.  Its record has its
  // index.
  void run(const Operation& operation, Nanos timeout, bool in_users_thread, Recording& recording);
  // Posts a message to or from a rank of the group.
  std::shared_ptr<Delivery> post(Message message);
  // The epoch that the message was posted in: it finishes its messages after it was replaced.
  std::shared_ptr<Epoch> epochOf(const Delivery& delivery) const;

  // ---- its failure
  // A loss is none while a next epoch may mend it.
  Failure failure() const;
  void check() const;
  // Aborts all epochs, and keeps later ones from being made.
  void abort(const std::string& why);
  void checkAborted() const;
  // There is no next epoch: the other ranks go on without this one.  Returns the error of this call
  // and of all later ones.
  Error end(const Error& error);

  // ---- the next one
  // An epoch that may replace the current one: a loss in it counts.
  void add(const std::shared_ptr<Epoch>& candidate);
  // All ranks that go on have made it, so none of them needs this rank in an older one.
  void enter(const std::shared_ptr<Epoch>& next);
  // In all epochs.
  Sight look(int rank) const;
  // Whether this rank itself has found that it cannot reach that one.
  bool isCut(int rank) const;
  // Whether its process is stopped, or does not answer.
  bool isStopped(int rank) const;
  // Remembers how those of `before` were lost that are not among `left`.
  void noteLosses(const std::vector<int>& before, const std::vector<int>& left,
                  const std::string& during);

  // ---- texts
  std::string ownName() const;  // "rank 1 of group 'x'"
  // "rank 2 (pid 7 on host a) is lost: its process ended"
  std::string howAbsent(int rank) const;
  std::string textOf(const Operation& operation, uint64_t sequence) const;
  // Of an operation that needs the data of a lost rank.
  Error lacks(const Operation& operation, uint64_t sequence, int rank) const;
  Facts facts(int rank, bool is_final) const;

 private:
  std::vector<std::shared_ptr<Epoch>> all() const;
  void record(Epoch& epoch);

  const int rank_, size_;
  const GroupOptions& options_;
  const bool may_be_replaced_;
  Recorder& messages_;

  mutable std::mutex mutex_;
  std::shared_ptr<Epoch> current_;
  std::vector<std::shared_ptr<Epoch>> candidates_;
  std::set<int> sent_to_, sent_earlier_;  // ranks: messages of this epoch, and of those before
  std::map<int, std::string> absent_;     // as howAbsent() says
  std::string aborted_;                   // why
  std::optional<Error> ended_;
};

}  // namespace ringreduce
