// Runs the operations of a group that goes on after losses between hosts: each until all ranks that
// go on hold its result.  `run` keeps a copy of the input and attempts the operation, which a
// barrier ends.  After a loss `recover` agrees on a plan with the others (survival/recovery.h) and
// makes the next epoch; unless the plan says that the operation is done, it is attempted again.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>

#include "base/executor.h"
#include "bootstrap/store.h"
#include "epoch/operation.h"
#include "survival/epochs.h"
#include "survival/recovery.h"

namespace ringreduce {

class Survivors {
 public:
  // `store`: used after each loss.  `patience`: how long the ranks that are not lost may take to
  // come to it, if the operation's own timeout is not longer.  The others outlive this object.
  Survivors(Epochs& epochs, Executor& executor, const std::shared_ptr<Store>& store,
            const std::atomic<Nanos>& patience);

  // Throws PeerLost if the operation lacks data of a lost rank; the group then goes on, unless the
  // error says that it is final.
  void run(const Operation& operation, Nanos timeout, bool in_users_thread, Recording& recording);

  size_t stagingBytes() const { return inputs_bytes_; }

 private:
  // The operation that runs.
  struct Call {
    const Operation& operation;
    const uint64_t sequence;
    const Nanos timeout;
    const bool in_users_thread;
    Recording& recording;
    Standing standing;
  };
  void attempt(Call& call);
  bool recover(const Error& loss, Call& call);
  bool makeNextEpoch(const Recovery::Watch& watch, const Call& call, Nanos patience,
                     int& fruitless);
  void keepInputs(const Overwritten& inputs);
  Error lostIn(const Call& call, const std::vector<int>& before) const;
  Error tooFew(const std::vector<int>& before) const;
  void tell(const Error& error);

  Epochs& epochs_;
  Executor& executor_;
  const std::atomic<Nanos>& patience_;
  const SharedOptions shared_;
  Recovery recovery_;
  std::unique_ptr<std::byte[]> inputs_;  // of the running operation
  std::atomic<size_t> inputs_bytes_ = 0;
};

}  // namespace ringreduce
