// How the arbiter polls, fails the group, and goes on without lost ranks.
#include "health/arbiter.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/limits.h"
#include "base/op_signature.h"
#include "base/text.h"

namespace ringreduce {
namespace {

constexpr Nanos kCensusPeriod = 50 * kMillisecond;                  // between questions about calls
constexpr Nanos kMostError = std::numeric_limits<uint32_t>::max();  // that is announced
// How long a rank reads bytes that have arrived already, before it trusts its view of the others.
constexpr Nanos kReadTime = 20 * kMillisecond;

void sleepMillisecond() {
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace

Arbiter::Arbiter(std::unique_ptr<PeerView> peers, AfterLoss on_loss, int min_ranks)
    : peers_(std::move(peers)),
      rank_(peers_->rank()),
      size_(peers_->size()),
      options_(peers_->options()),
      on_loss_(on_loss),
      min_ranks_(min_ranks),
      arrived_(static_cast<size_t>(size_)),
      why_(static_cast<size_t>(size_)) {
  peers_->reportTo([this](const GroupFailure& failure) { decide(failure); });
}

void Arbiter::begin(const OpSignature& operation, Nanos timeout, bool in_users_thread,
                    const Inherited& why) {
  Nanos arrived = 0;
  wait_ = WaitClock(timeout, options_.stall, now(arrived));
  std::ranges::fill(arrived_, 0);
  arrived_[static_cast<size_t>(rank_)] = arrived;
  first_data_ = their_error_ = 0;
  current_ = {operation};
  if (const ClockOffset offset = clock(); offset.isKnown() && offset.error <= kMostError) {
    current_.arrived = arrived - offset.ahead;
    current_.clock_error = static_cast<uint32_t>(offset.error);
  }
  current_.why = why_[static_cast<size_t>(rank_)] = why;
  current_.history = history_;
  history_ = current_.historyAfter();
  inline_ = in_users_thread;
  in_monitored_barrier_.store(operation.kind == Kind::kMonitoredBarrier, std::memory_order_relaxed);
  check();
  has_more_time_ = false;
  // Before the log names ranks that are late.
  next_question_ = std::min(wait_.started() + kSecond, wait_.nextReport() - limits::kAnswer);
  peers_->setAwaitedRank(-1);
  peers_->announce(current_);
}

void Arbiter::end() {
  in_monitored_barrier_.store(false, std::memory_order_relaxed);
  peers_->setAwaitedRank(-1);
  if (isLeftOut()) throwFailure();
}

// ---- the failure

void Arbiter::decide(const GroupFailure& failure) {
  // The group of a rank that is left out is the others'.
  if (!isLeftOut() && verdict_.decide(failure) && failure.reporter == rank_) peers_->tell(failure);
  peers_->wakeAll();
}

void Arbiter::check() const {
  if (failed()) throwFailure();
}

void Arbiter::fail(Failure kind, int culprit, const std::string& text) {
  decide({.kind = kind, .culprit = culprit, .reporter = rank_, .text = text});
  throwFailure();
}

Error Arbiter::errorOfGone(const std::vector<int>& ranks, const std::string& doing) {
  const Finding found = gone(*peers_, ranks, doing);
  check();  // a rank that fails, and leaves for that, tells of the failure first
  const bool ends_group = on_loss_ == AfterLoss::kFails;
  if (ends_group && found.kind == Failure::kPeerLost) fail(found);
  return Error(Failure::kPeerLost, found.text, factsOf(found.culprit(), rank_, ends_group));
}

void Arbiter::abort(const std::string& why) {
  decide({.kind = Failure::kAborted,
          .culprit = rank_,
          .reporter = rank_,
          .text = peers_->who(rank_) + " aborted group '" + options_.name + "': " + why});
}

void Arbiter::throwFailure() const {
  if (isLeftOut())
    throw Error(Failure::kPeerLost,
                peers_->who(rank_) + " was left out of group '" + options_.name +
                    "': " + kDidNotAnswer +
                    " (was it stopped, or its container paused?), and the other ranks go on "
                    "without it. Start it again.",
                factsOf(rank_, rank_, true));
  const Failure kind = verdict_.kind();
  const int reporter = verdict_.reporter();
  std::string text = verdict_.text();
  if (kind != Failure::kMismatch && kind != Failure::kAborted)
    text += ", in group '" + options_.name + "'";
  text += "; noticed by rank " + options_.shown(reporter);
  if (reporter != rank_) text += ", learned by rank " + options_.shown(rank_);
  if (in_monitored_barrier_ && rank_ != 0)
    text += ". Rank " + options_.shown(rank_) +
            " successfully reached monitoredBarrier, but received errors while waiting for "
            "send/recv from rank " +
            options_.shown(0);
  const bool goes_on = on_loss_ == AfterLoss::kNeedsEpoch && kind == Failure::kPeerLost;
  text += goes_on ? kGroupGoesOn : kGroupHasFailed;
  throw Error(kind, text, factsOf(culprit(), reporter, !goes_on));
}

Facts Arbiter::factsOf(int culprit, int reporter, bool is_final) const {
  return {.rank = culprit == kNobody ? kNobody : options_.shownAs(culprit),
          .reporter = options_.shownAs(reporter),
          .group = options_.name,
          .is_final = is_final};
}

// ---- polling

void Arbiter::poll(int rank, Ready ready) {
  check();
  if (inline_ && options_.interrupt) options_.interrupt();
  // Also where a user's thread runs it: Python's signals reach the main one only.
  if (options_.interrupted && options_.interrupted(wait_.started())) {
    abort("interrupted in " + peers_->textOf(current_));
    throwFailure();
  }
  peers_->setAwaitedRank(rank);
  compareSignatures();
  blameMissing(rank, ready);
  const Nanos time = now();
  if (time >= next_question_) next_question_ = peers_->askAgain(time);
  if (wait_.isOver(time) && !ready()) {
    refreshProgress();
    compareSignatures();
    if (ready()) return;
    Finding found = late(*peers_, current_, rank);
    if (on_loss_ == AfterLoss::kIsAbsent && evict(rank, found.ranks, ready)) return;
    found.text += timedOut();
    if (current_.kind == Kind::kMonitoredBarrier)
      found.text = monitoredBarrierText(found.ranks) + ". " + found.text;
    // The others go on without a rank whose process does not run: see culprit().
    if (on_loss_ == AfterLoss::kNeedsEpoch) {
      for (const int r : found.ranks)
        if (peers_->isStopped(r) || peers_->isSilent(r, wait_.started()))
          fail(Failure::kPeerLost, r, found.text);
      if (!std::exchange(has_more_time_, true)) {  // it may have been stopped until now
        wait_.extend(time + limits::kTimeToGoOn);
        return;
      }
    }
    fail(found);
  }
  if (!ready() && wait_.reportIsDue(time))
    log("rank " + options_.shown(rank_) + " of group '" + options_.name + "' has waited " +
        seconds(wait_.waited(time)) + " in " + peers_->textOf(current_) + ": " +
        late(*peers_, current_, rank).text);
}

std::string Arbiter::timedOut() const {
  return ": " + peers_->textOf(current_) + " timed out after a timeout of " +
         seconds(wait_.timeout());
}

std::string Arbiter::when(int rank, const char* before) const {
  return (peers_->hasAnnounced(rank, current_.sequence) ? "during " : before) +
         peers_->textOf(current_);
}

// Compares the announcements of the ranks.  Between hosts no data reveals the mismatch if two ranks
// wait for each other in different operations, or if one waits for a rank that sends nothing in
// that operation and has gone on.  So a rank compares the latest known operation of each other rank
// with its own operation of the same number.  Of two ranks, the one that is further ahead finds the
// mismatch.
void Arbiter::compareSignatures() {
  for (int r = 0; r < size_; ++r)
    if (r != rank_)
      if (const auto sequence = peers_->findDifference(r, current_.sequence))
        mismatch(r, nullptr, *sequence);
}

// A rank may have done its part before it was lost or left, so `ready` is asked once more.
void Arbiter::blameMissing(int rank, Ready ready) {
  for (const int r : peers_->missing(current_.sequence, rank)) {
    if (ready()) return;
    if (on_loss_ == AfterLoss::kIsAbsent)
      goOnWithout(r);
    else
      failLost(r, when(r));
  }
}

// A rank that has left writes nothing more either.  The lost rank may have used up the deadline, so
// the others get more time.
void Arbiter::goOnWithout(int rank) {
  const std::string when = this->when(rank);
  const int left = static_cast<int>(peers_->live().size()) - 1;
  if (left < min_ranks_)
    failLost(rank, when + "; " + std::to_string(left) + (left == 1 ? " rank is" : " ranks are") +
                       " left, and min_ranks is " + std::to_string(min_ranks_));
  wait_.extend(deadlineIn(std::min(wait_.timeout(), limits::kTimeToGoOn)));
  if (peers_->known(rank).isLost()) leaveOut(peers_->page(rank));
  peers_->setAbsent(rank);
  if (peers_->live().front() != rank_) return;  // one line is enough
  log(peers_->howAbsent(rank) + ", " + when + " of group '" + options_.name + "'; " +
      std::to_string(left) + " of " + std::to_string(size_) +
      (left == 1 ? " ranks goes on" : " ranks go on"));
}

// Returns whether the wait is over or goes on without a rank that is gone now, also if another rank
// has done this; if not, the operation times out.
bool Arbiter::evict(int waited_for, const std::vector<int>& late, Ready ready) {
  // A rank that is gone already changes nothing any more, unless this wait is about to go on
  // without it: it may have announced the operation before, and done its part.
  std::vector<int> ranks = peers_->live();
  const size_t not_absent = ranks.size();
  std::erase_if(ranks, [&](int r) { return r != rank_ && !peers_->stateOf(r).isHere(); });
  blameMissing(waited_for, ready);
  return peers_->live().size() < not_absent || peers_->evict(
                                                   ranks, late, static_cast<size_t>(min_ranks_),
                                                   [&] { return ready() || failed(); }, timedOut());
}

void Arbiter::endOperation(int rank) {
  throw Error(Failure::kPeerLost,
              peers_->howAbsent(rank) + "; rank " + options_.shown(rank_) + " needs its data in " +
                  peers_->textOf(current_) + ". Group '" + options_.name + "' goes on without it.",
              factsOf(rank, rank_, false));
}

// The rank that this one waits for may be healthy and wait for a lost rank.
void Arbiter::idle(Ready ready) {
  for (const int r : peers_->lostFor(limits::kNews))
    if (!ready()) broken(r, kProcessEnded);
}

void Arbiter::broken(int rank, const std::string& how) {
  // The control ring is about to say more.
  for (const Nanos until = deadlineIn(limits::kNews);
       !failed() && peers_->stateOf(rank).isHere() && now() < until;)
    sleepMillisecond();
  check();
  // Between hosts, its announcement may be unknown here.
  failLost(rank, when(rank, "before it was seen in "), how);
}

void Arbiter::verify(int rank) {
  const Announcement& theirs = peers_->page(rank).announcements[current_.sequence % kAnnouncements];
  if (theirs != current_) mismatch(rank);
  noteData(rank, theirs);
}

void Arbiter::verify(int rank, const Announcement& theirs) {
  peers_->record(rank, theirs.sequence, theirs);
  if (theirs != current_) mismatch(rank, &theirs);
  if (first_data_ == 0) first_data_ = monotonicNow();
  noteData(rank, theirs);
}

void Arbiter::noteData(int rank, const Announcement& theirs) {
  // Over a transport they may be any numbers.
  const auto isTime = [](Nanos time) { return time >= 0 && time < kNever / 4; };
  if (theirs.arrived == 0 || !isTime(theirs.arrived)) return;
  arrived_[static_cast<size_t>(rank)] = theirs.arrived + clock().ahead;
  why_[static_cast<size_t>(rank)] =
      theirs.why.rank >= Inherited::kUnknown ? theirs.why : Inherited{};
  their_error_ = std::max<Nanos>(their_error_, theirs.clock_error);
}

void Arbiter::disagree(int sender, int receiver, uint64_t sent, uint64_t expected) {
  const auto elements = [](uint64_t n) {
    return std::to_string(n) + (n == 1 ? " element" : " elements");
  };
  fail(Failure::kMismatch, sender,
       "ranks disagree on " + peers_->textOf(current_) + ": rank " + options_.shown(sender) +
           " sends " + elements(sent) + " to rank " + options_.shown(receiver) +
           ", which expects " + elements(expected));
}

// ---- late ranks

void Arbiter::refreshProgress() const {
  peers_->await(otherRanks(rank_, size_), kNoOperation, kReadTime, [&] { return failed(); });
  check();
}

// ---- mismatches

void Arbiter::mismatch(int other, const OpSignature* sent, uint64_t about) {
  // Ask for the others' calls: the largest party is right (health/judge.h).  They may disagree
  // about this operation, or about one in which this rank did not wait.
  const Nanos until = deadlineIn(peers_->answerTime());
  const uint64_t first = std::min(
      about, current_.sequence - std::min(current_.sequence, kAnnouncements - kMaxSlots - 1));
  Nanos next_ask = 0;
  PeerView::Census found = peers_->census(first, current_.sequence, other, sent);
  while (!found.complete && !failed() && now() < until) {
    if (now() >= next_ask) {
      peers_->ask(first);
      next_ask = now() + kCensusPeriod;
    }
    sleepMillisecond();
    // A rank that only sends runs ahead, and its later announcements replace what was found.
    PeerView::Census again = peers_->census(first, current_.sequence, other, sent);
    if (again.parties.size() > 1 || found.parties.size() < 2) found = std::move(again);
  }
  fail(differs(*peers_, std::move(found), other, sent));
}

// ---- texts

// PyTorch's words for monitored_barrier: the ranks that did not arrive, and the one that waited.
std::string Arbiter::monitoredBarrierText(const std::vector<int>& late) const {
  const long ms = wait_.timeout() / kMillisecond;
  std::string text = late.size() > 1 ? "Ranks " : "Rank ";
  text += joined(options_.shownAs(late), ", ");
  text += " failed to pass monitoredBarrier in " + std::to_string(ms) + " ms";
  if (late.size() > 1) text += ", Rank " + options_.shown(late.front()) + " first";
  return text + ". Rank " + options_.shown(rank_) + " timed out in monitoredBarrier";
}

}  // namespace ringreduce
