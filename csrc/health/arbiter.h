// The arbiter of an epoch decides that it has failed, and why.  Most groups have one epoch, so
// their arbiter decides for the group.  It has a PeerView of the ranks.  The functions of
// health/judge.h find the ranks that are late, lost, or called another operation.
//
// Sources report to it:
//
//   shared pages     departures, announced operations   read in poll() and stateOf()
//   pidfds, pipes    ended processes                    read in poll() and stateOf()
//   control ring     the same of ranks of other hosts, their progress and failures
//   connections      broken connections for messages (onDisconnect)
//   waits            deadlines, Ctrl-C, mismatches (WaitGuard), errors of callers (fail)
//
// Between hosts a lost rank is reported by the rank that waits for its data, or by a rank whose
// wait makes no progress (idle).  All other ranks receive that failure.
//
// Who finds that a rank is gone, and what decides on it:
//
//   its process has ended        SharedView::look: a wait of the arbiter
//   it is stopped or silent at   SharedView::evict, which kills it or leaves it out, or
//     a deadline                 Arbiter::poll between hosts, for a group that goes on
//   its host is lost, or it      the control ring (control/control.cc): MirrorView::onPeersLost,
//     ended, between hosts       and then the wait that needs its data; in the stages of the
//                                hierarchy inside a host Hierarchy::Inside::poll
//   its connection for data is   the transport: WaitGuard::broken, idle
//     broken
//   that for messages is broken  MirrorView::onDisconnect, after limits::kNewsOfRing
//   amid a GPU operation         the watchdog (cuda/communicator), and between hosts RemoteRanks;
//                                amid one of torch's NCCL InnerNccl (torch/inner_nccl.h)
//   while a group is made        bootstrap/rendezvous.cc, host_memory.cc and, between hosts,
//                                host_links.cc: before the arbiter
//
// Then the arbiter decides: the epoch fails, or goes on without that rank.  Recovery::agree
// (survival/recovery.cc) decides which ranks the next epoch leaves out.
//
// The first cause wins, and all ranks raise its error (health/verdict.h).  A failure is final: the
// group cannot be used any more.
//
// A group in shared memory that survives losses (SharedOptions::on_loss) does not fail when a
// rank ends or leaves.  The rank is *absent* from then on, once this rank's own wait has found it
// gone; collectives then do without it (transport/shm/exchange.h, collectives/reduction.h).  A rank
// whose process is stopped at a deadline is killed.  One whose process does not run, and cannot be
// seen or killed, is left out (health/pulse.h).  If it runs again, its next call raises PeerLost.
// Between hosts a loss fails the epoch (epoch/epoch.h), and a new one takes its place.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/op_signature.h"
#include "base/wait_clock.h"
#include "bootstrap/options.h"
#include "health/judge.h"
#include "health/peer_view.h"
#include "health/verdict.h"
#include "transport/shm/page.h"
#include "transport/wait_guard.h"

namespace ringreduce {

// How the texts of failures end.
inline constexpr char kGroupGoesOn[] =
    ". Messages that were under way are lost; the group goes on with its next collective.";
inline constexpr char kGroupHasFailed[] = ". The group has failed: destroy it and make a new one.";

// What a lost rank means for the group.
enum class AfterLoss : uint8_t {
  kFails,       // the group fails
  kIsAbsent,    // the ranks share memory: operations go on without it
  kNeedsEpoch,  // between hosts: this epoch ends, and the group goes on in another one
};

class Arbiter final : public WaitGuard {
 public:
  // `min_ranks`: as in SharedOptions.
  Arbiter(std::unique_ptr<PeerView> peers, AfterLoss on_loss, int min_ranks);

  // Starts an operation.  Throws if the group has failed.  `in_users_thread`: Ctrl-C can end it.
  // `why`: this rank did not come sooner.
  void begin(const OpSignature& operation, Nanos timeout, bool in_users_thread,
             const Inherited& why = {});
  // Throws if the others have left this rank out meanwhile: then its result may be wrong.
  void end();
  const Announcement& current() const { return current_; }  // the operation that runs

  // ---- when ranks came to the operation that runs or ran last, in CLOCK_MONOTONIC of this host
  Nanos started() const { return arrived_[static_cast<size_t>(rank_)]; }
  // By rank; 0: not known.  A rank's time is known once its data, or an answer, has come.
  const std::vector<Nanos>& arrivals() const { return arrived_; }
  // Why a rank that is known to have come did not come sooner.
  const Inherited& whyLate(int rank) const { return why_[static_cast<size_t>(rank)]; }
  // Between hosts: when the first data of another rank were there; 0: none were.
  Nanos firstData() const { return first_data_; }
  // Those of other ranks are off by this at most; kNever: this host's clock is not known.
  Nanos arrivalError() const { return clock().isKnown() ? clock().error + their_error_ : kNever; }
  // How far this host's clock is ahead of the group's.  From any thread.
  ClockOffset clock() const { return peers_->clock(); }

  // ---- the failure

  // Fails the group, unless it has failed already, and throws its failure.
  [[noreturn]] void fail(Failure kind, int culprit, const std::string& text);
  [[noreturn]] void fail(const Finding& found) { fail(found.kind, found.culprit(), found.text); }
  // The same for a rank that is lost or has left.  `when`: "during barrier #3".  `how`: why it is
  // lost, if the arbiter does not know.
  [[noreturn]] void failLost(int rank, const std::string& when, const std::string& how = {}) {
    fail(lost(*peers_, rank, when, how));
  }
  // For a message to or from `ranks`, all of which are gone: fails the group if one of them is
  // lost.  If they have left, or the group survives losses, returns the error of this message
  // alone.  Throws the group's failure if there is one: ranks may have left because of it.
  Error errorOfGone(const std::vector<int>& ranks, const std::string& doing);
  // Fails the group without throwing, from any thread.
  void abort(const std::string& why);
  // Throws if the group has failed.
  void check() const;
  bool failed() const override { return verdict_.exists() || isLeftOut(); }
  // Which rank is to blame for the failure, if there is one; or kNobody.
  int culprit() const { return isLeftOut() ? rank_ : verdict_.culprit(); }
  int reporter() const { return isLeftOut() ? rank_ : verdict_.reporter(); }
  // Why the group has failed, or kNone.  For a rank that is left out it has: kPeerLost.
  Failure failure() const { return isLeftOut() ? Failure::kPeerLost : verdict_.kind(); }

  // ---- the state of ranks, from any thread

  PeerView& peers() const { return *peers_; }
  // Waits briefly for the other ranks' progress before one is blamed for being late: this rank may
  // be the one that was stopped.  Throws if the group has failed.
  void refreshProgress() const;

  // ---- WaitGuard
  void poll(int rank, Ready ready) override;
  void idle(Ready ready) override;
  void verify(int rank) override;
  void verify(int rank, const Announcement& theirs) override;
  [[noreturn]] void broken(int rank, const std::string& how) override;
  [[noreturn]] void disagree(int sender, int receiver, uint64_t sent, uint64_t expected) override;
  PeerState stateOf(int rank) const override { return peers_->stateOf(rank); }
  bool isAbsent(int rank) const override { return peers_->isAbsent(rank); }
  [[noreturn]] void endOperation(int rank) override;

 private:
  // the failure
  void decide(const GroupFailure& failure);
  [[noreturn]] void throwFailure() const;
  Facts factsOf(int culprit, int reporter, bool is_final) const;
  // polling
  void compareSignatures();
  void blameMissing(int rank, Ready ready);
  // A loss in a group that survives it.
  void goOnWithout(int rank);
  bool isLeftOut() const { return peers_->isLeftOut(); }
  void noteData(int rank, const Announcement& theirs);
  bool evict(int waited_for, const std::vector<int>& late, Ready ready);
  // blame
  // Rank `other` called another operation.  `sent` is the signature that it sent, if it sent one.
  // `about` is the sequence number if the mismatch is in an earlier operation.
  [[noreturn]] void mismatch(int other, const OpSignature* sent = nullptr,
                             uint64_t about = kNoOperation);
  // "during barrier #3", or `before` if that rank has not announced it.
  std::string when(int rank, const char* before = "before it came to ") const;
  // ": barrier #3 timed out after a timeout of 5 s"
  std::string timedOut() const;
  std::string monitoredBarrierText(const std::vector<int>& late) const;

  const std::unique_ptr<PeerView> peers_;
  const int rank_, size_;
  const GroupOptions& options_;
  const AfterLoss on_loss_;
  const int min_ranks_;
  Verdict verdict_{*peers_};
  Nanos next_question_ = 0;

  Announcement current_;
  std::vector<Nanos> arrived_;  // by rank; 0: not known
  std::vector<Inherited> why_;  // of those that have arrived
  Nanos first_data_ = 0, their_error_ = 0;
  uint64_t history_ = 0;
  bool inline_ = false, has_more_time_ = false;
  WaitClock wait_{kNever, kNever, 0};
  std::atomic<bool> in_monitored_barrier_{false};  // also read by waits for messages
};

}  // namespace ringreduce
