// The clock of one wait: how long it has lasted, when it is over, and when the log says that it
// goes on.
//
// How long a wait may last, and who throws Timeout:
//
//   an operation      its own timeout, else the group's (Group::execute).  Arbiter::poll throws,
//                     and `late` (health/judge.h) names the rank.
//   a message         the same: Messenger::timedOut (p2p/messenger.cc)
//   making a group    GroupOptions::timeout: Meeting::stepClock, in bootstrap/rendezvous.cc, and
//                     JoinGuard::giveUp, in bootstrap/host_links.cc
//   a successor       that, and limits::kLaterNews: survival/successor.h
//   descriptors       that of making the group: group/exchange_fds.cc
//   after a loss      the group's and limits::kTimeToGoOn: Recovery::agree (survival/recovery.cc)
//   joining           the group's: State._ask, in ringreduce/elastic.py
//   leaving           the group's: Messenger::stop.  It is logged, and what was not sent fails.
//   a GPU's kernel    the operation's, by the GPU's clock: Guard::ending (cuda/kernels/guard.h)
//   a GPU's stream    the operation's: Watchdog::checkDeadlines fails the group, for the kernel
//                     too; Watchdog::check and wait, and the next call, throw.
//                     On one host cuda/communicator/host_ranks.cc names the late rank.  Between
//                     hosts cuda/internode/remote_ranks.cc does, and nccl_ring.cc and nccl.cc for
//                     a wait in NCCL.
//   a host for a GPU  what the caller gave, else the group's: torch/gpu_backend.cc
//   Work.wait         what the caller gave: torch/work.cc; the operation goes on
//
// What one rank grants another beyond these is in base/limits.h.
#pragma once

#include <algorithm>

#include "base/clock.h"

namespace ringreduce {

// Of the process's clock (base/clock.h).
class WaitClock {
 public:
  // `stall`: the log first says that the wait goes on after this time.
  WaitClock(Nanos timeout, Nanos stall, Nanos started = now())
      : started_(started),
        timeout_(timeout),
        deadline_(deadlineIn(timeout, started)),
        next_report_(deadlineIn(stall, started)) {}

  Nanos started() const { return started_; }
  Nanos timeout() const { return timeout_; }
  Nanos waited(Nanos time = now()) const { return time - started_; }
  bool isOver(Nanos time = now()) const { return time >= deadline_; }
  // It may last until then, if that is later than now.
  void extend(Nanos deadline) { deadline_ = std::max(deadline_, deadline); }
  Nanos nextReport() const { return next_report_; }
  // Whether to say that it goes on: each time that it has lasted twice as long.
  bool reportIsDue(Nanos time = now()) {
    if (time < next_report_) return false;
    next_report_ = time + std::max(waited(time), kSecond);
    return true;
  }

 private:
  Nanos started_, timeout_, deadline_, next_report_;
};

}  // namespace ringreduce
