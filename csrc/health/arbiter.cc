// How the arbiter polls, fails the group, goes on without lost ranks, and takes news of ranks of
// other hosts.
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
#include "bootstrap/process.h"
#include "transport/shm/wait.h"

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

Arbiter::Arbiter(int rank, std::vector<Seat> seats, const GroupOptions& options,
                 PeerChannel* channel, const SharedOptions& shared)
    : rank_(rank),
      size_(static_cast<int>(seats.size())),
      options_(options),
      channel_(channel),
      min_ranks_(shared.min_ranks),
      goes_on_within_(shared.goesOn() && !channel),
      needs_epoch_(shared.goesOn() && channel),
      peers_(rank, std::move(seats), options, channel, goes_on_within_ && size_ > 1),
      arrived_(static_cast<size_t>(size_)),
      why_(static_cast<size_t>(size_)),
      clock_error_(channel ? kNever : 0) {
  if (!goes_on_within_ || size_ == 1) return;
  try {
    pulse_ = std::make_unique<Pulse>(page(rank_));
  } catch (const Error&) {
    depart(Declared::kGone);  // the others have made the group
    throw;
  }
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
  peers_.setAwaitedRank(-1);
  if (channel_) return peers_.record(rank_, operation.sequence, current_);
  RankPage& own = page(rank_);
  own.announcements[operation.sequence % kAnnouncements] = current_;
  own.announced.publish(operation.sequence + 1);
}

void Arbiter::end() {
  in_monitored_barrier_.store(false, std::memory_order_relaxed);
  peers_.setAwaitedRank(-1);
  if (isLeftOut()) throwFailure();
}

void Arbiter::depart(Declared how) {
  std::atomic_ref(page(rank_).departed)
      .store(static_cast<uint32_t>(how), std::memory_order_release);
  if (channel_) return channel_->depart(how);
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    wakeIfWaiting(page(r), rank_);
    wakeSleeper(page(r).messenger_wake_word);
  }
}

void Arbiter::wakeMessenger(int rank) {
  uint32_t& word = page(rank).messenger_wake_word;
  if (channel_ && rank != rank_)
    channel_->wakePeer(rank);
  else if (channel_ || std::atomic_ref(word).load(std::memory_order_seq_cst))
    wakeSleeper(word);
}

// ---- the failure

void Arbiter::decide(const GroupFailure& failure) {
  // The group of a rank that is left out is the others'.
  if (!isLeftOut() && verdict_.decide(failure) && channel_ && failure.reporter == rank_)
    channel_->broadcastError(failure);
  wakeAll();
}

void Arbiter::wakeAll() {
  for (int r = 0; r < size_; ++r) {
    wake(page(r));
    wakeSleeper(page(r).messenger_wake_word);
  }
}

void Arbiter::check() const {
  if (failed()) throwFailure();
}

void Arbiter::fail(Failure kind, int culprit, const std::string& text) {
  decide({.kind = kind, .culprit = culprit, .reporter = rank_, .text = text});
  throwFailure();
}

Error Arbiter::errorOfGone(const std::vector<int>& ranks, const std::string& doing) {
  const Finding found = gone(peers_, ranks, doing);
  const bool ends_group = !goes_on_within_ && !needs_epoch_;
  if (ends_group && found.kind == Failure::kPeerLost) fail(found);
  return Error(Failure::kPeerLost, found.text, factsOf(found.culprit(), rank_, ends_group));
}

void Arbiter::abort(const std::string& why) {
  decide({.kind = Failure::kAborted,
          .culprit = rank_,
          .reporter = rank_,
          .text = peers_.who(rank_) + " aborted group '" + options_.name + "': " + why});
}

void Arbiter::throwFailure() const {
  if (isLeftOut())
    throw Error(Failure::kPeerLost,
                peers_.who(rank_) + " was left out of group '" + options_.name +
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
  const bool goes_on = needs_epoch_ && kind == Failure::kPeerLost;
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
    abort("interrupted in " + peers_.textOf(current_));
    throwFailure();
  }
  peers_.setAwaitedRank(rank);
  compareSignatures();
  if (channel_)
    askNowAndThen();  // the transport, which knows what is still in flight, reports lost ranks
  else
    blameMissing(rank, ready);
  const Nanos time = now();
  if (wait_.isOver(time) && !ready()) {
    refreshProgress();
    compareSignatures();
    if (ready()) return;
    Finding found = late(peers_, current_, rank);
    if (goes_on_within_ && evict(rank, found.ranks, ready)) return;
    found.text += timedOut();
    if (current_.kind == Kind::kMonitoredBarrier)
      found.text = monitoredBarrierText(found.ranks) + ". " + found.text;
    // The others go on without a rank whose process does not run: see culprit().
    if (needs_epoch_) {
      for (const int r : found.ranks)
        if (peers_.isStopped(r) || peers_.isSilent(r, wait_.started()))
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
        seconds(wait_.waited(time)) + " in " + peers_.textOf(current_) + ": " +
        late(peers_, current_, rank).text);
}

std::string Arbiter::timedOut() const {
  return ": " + peers_.textOf(current_) + " timed out after a timeout of " +
         seconds(wait_.timeout());
}

std::string Arbiter::when(int rank, const char* before) const {
  return (peers_.hasAnnounced(rank, current_.sequence) ? "during " : before) +
         peers_.textOf(current_);
}

// Compares the announcements of the ranks.  Between hosts no data reveals the mismatch if two ranks
// wait for each other in different operations, or if one waits for a rank that sends nothing in
// that operation and has gone on.  So a rank compares the latest known operation of each other rank
// with its own operation of the same number.  Of two ranks, the one that is further ahead finds the
// mismatch.
void Arbiter::compareSignatures() {
  for (int r = 0; r < size_; ++r)
    if (r != rank_)
      if (const auto sequence = peers_.findDifference(r, current_.sequence))
        mismatch(r, nullptr, *sequence);
}

// Where all ranks share memory.  A lost rank or one that left is missing if it never announced this
// operation, or if this wait is for it.  Its earlier writes are visible by now, so `ready` is asked
// once more.
void Arbiter::blameMissing(int rank, Ready ready) {
  const std::vector<PeerState> all = peers_.states();
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || isAbsent(r) || all[static_cast<size_t>(r)].isHere()) continue;
    if ((peers_.hasAnnounced(r, current_.sequence) && r != rank) || ready()) continue;
    if (goes_on_within_)
      goOnWithout(r);
    else
      failLost(r, when(r));
  }
}

// A rank that has left writes nothing more either.  The lost rank may have used up the deadline, so
// the others get more time.
void Arbiter::goOnWithout(int rank) {
  const std::string when = this->when(rank);
  const int left = static_cast<int>(peers_.live().size()) - 1;
  if (left < min_ranks_)
    failLost(rank, when + "; " + std::to_string(left) + (left == 1 ? " rank is" : " ranks are") +
                       " left, and min_ranks is " + std::to_string(min_ranks_));
  wait_.extend(deadlineIn(std::min(wait_.timeout(), limits::kTimeToGoOn)));
  if (peers_.known(rank).isLost()) leaveOut(page(rank));
  peers_.setAbsent(rank);
  if (peers_.live().front() != rank_) return;  // one line is enough
  log(peers_.howAbsent(rank) + ", " + when + " of group '" + options_.name + "'; " +
      std::to_string(left) + " of " + std::to_string(size_) +
      (left == 1 ? " ranks goes on" : " ranks go on"));
}

// At a deadline: kills those of the late ranks that are stopped, and leaves ranks out that do not
// answer, since their processes do not run.  First it gives them time, since all ranks may have
// been stopped, and be resumed one by one.  Returns whether the wait is over or goes on without a
// rank that is gone now, also if another rank has done this; if not, the operation times out.
bool Arbiter::evict(int waited_for, const std::vector<int>& late, Ready ready) {
  const Nanos began = now();
  // A rank that is gone already changes nothing any more, unless this wait is about to go on
  // without it: it may have announced the operation before, and done its part.
  std::vector<int> ranks = peers_.live();
  const size_t not_absent = ranks.size();
  std::erase_if(ranks, [&](int r) { return r != rank_ && !peers_.stateOf(r).isHere(); });
  blameMissing(waited_for, ready);
  if (peers_.live().size() < not_absent) return true;
  const auto pulses = [&](int r) {
    return std::atomic_ref(page(r).pulses).load(std::memory_order_acquire);
  };
  std::vector<uint32_t> before;
  for (const int r : ranks) {
    before.push_back(pulses(r));
    wakeSleeper(page(r).pulse_wake_word);
  }
  // If too few ranks would be left, the group fails in any case: no process ends for that.
  const auto too_many = [&](const std::vector<int>& lost) {
    return ranks.size() < lost.size() + static_cast<size_t>(min_ranks_);
  };
  bool killed = false, left_out = false;
  for (; !failed() && now() < began + limits::kTimeToGoOn; sleepMillisecond()) {
    if (ready()) return true;
    if (std::ranges::any_of(ranks,
                            [&](int r) { return r != rank_ && !peers_.stateOf(r).isHere(); }))
      return true;
    if (!killed && now() >= began + limits::kAnswer) {
      killed = true;
      const std::vector<int> stopped =
          too_many(peers_.stoppedOf(ranks)) ? std::vector<int>() : peers_.stoppedOf(late);
      for (const int r : stopped) {
        log("rank " + options_.shown(rank_) + " kills " + peers_.who(r) + ", which is stopped" +
            timedOut());
        kill(peers_.processOf(r).pidfd);
      }
    }
    if (left_out || now() < began + limits::kAnswerAtDeadline) continue;
    left_out = true;
    std::vector<int> silent;
    for (size_t i = 0; i < ranks.size(); ++i)
      if (ranks[i] != rank_ && pulses(ranks[i]) == before[i]) silent.push_back(ranks[i]);
    if (too_many(silent)) break;
    for (const int r : silent) {
      log("rank " + options_.shown(rank_) + " leaves " + peers_.who(r) +
          " out, whose process does not answer" + timedOut());
      leaveOut(page(r));
    }
  }
  return ready();
}

void Arbiter::endOperation(int rank) {
  throw Error(Failure::kPeerLost,
              peers_.howAbsent(rank) + "; rank " + options_.shown(rank_) + " needs its data in " +
                  peers_.textOf(current_) + ". Group '" + options_.name + "' goes on without it.",
              factsOf(rank, rank_, false));
}

// All ranks that wait need the progress of the others, and all receive the answers to one question.
// So the first rank asks, and each other one a little later than the rank before it, if none did.
void Arbiter::askNowAndThen() {
  const Nanos time = now();
  if (time < next_question_) return;
  const Nanos next = peers_.lastAnswer() + kSecond + kSecond * rank_ / size_;
  if (time < next) {
    next_question_ = next;
    return;
  }
  next_question_ = time + kSecond;
  channel_->askForProgress();
}

// The rank that this one waits for may be healthy and wait for a lost rank.
void Arbiter::idle(Ready ready) {
  for (int r = 0; r < size_ && channel_; ++r) {
    if (!peers_.known(r).isLost() || now() - peers_.lostSince(r) < limits::kNews || ready())
      continue;
    broken(r, kProcessEnded);
  }
}

void Arbiter::broken(int rank, const std::string& how) {
  // The control ring is about to say more.
  for (const Nanos until = deadlineIn(limits::kNews);
       !failed() && peers_.stateOf(rank).isHere() && now() < until;)
    sleepMillisecond();
  check();
  // Between hosts, its announcement may be unknown here.
  failLost(rank, when(rank, "before it was seen in "), how);
}

void Arbiter::verify(int rank) {
  const Announcement& theirs = page(rank).announcements[current_.sequence % kAnnouncements];
  if (theirs != current_) mismatch(rank);
  noteData(rank, theirs);
}

void Arbiter::verify(int rank, const Announcement& theirs) {
  peers_.record(rank, theirs.sequence, theirs);
  if (theirs != current_) mismatch(rank, &theirs);
  noteData(rank, theirs);
}

void Arbiter::noteData(int rank, const Announcement& theirs) {
  if (channel_ && first_data_ == 0) first_data_ = monotonicNow();
  // Over a transport they may be any numbers.
  const auto isTime = [](Nanos time) { return time >= 0 && time < kNever / 4; };
  if (theirs.arrived == 0 || !isTime(theirs.arrived)) return;
  arrived_[static_cast<size_t>(rank)] = theirs.arrived + ahead_;
  why_[static_cast<size_t>(rank)] =
      theirs.why.rank >= Inherited::kUnknown ? theirs.why : Inherited{};
  their_error_ = std::max<Nanos>(their_error_, theirs.clock_error);
}

void Arbiter::onClock(const ClockOffset& offset) {
  ahead_ = offset.ahead;
  clock_error_ = offset.error;
}

void Arbiter::disagree(int sender, int receiver, uint64_t sent, uint64_t expected) {
  const auto elements = [](uint64_t n) {
    return std::to_string(n) + (n == 1 ? " element" : " elements");
  };
  fail(Failure::kMismatch, sender,
       "ranks disagree on " + peers_.textOf(current_) + ": rank " + options_.shown(sender) +
           " sends " + elements(sent) + " to rank " + options_.shown(receiver) +
           ", which expects " + elements(expected));
}

// ---- late ranks

void Arbiter::refreshProgress() const {
  peers_.ask(otherRanks(rank_, size_), kNoOperation, kReadTime, [&] { return failed(); });
  check();
}

// ---- mismatches

void Arbiter::mismatch(int other, const OpSignature* sent, uint64_t about) {
  // Ask for the others' calls: the largest party is right (health/judge.h).  They may disagree
  // about this operation, or about one in which this rank did not wait.
  const Nanos until = deadlineIn(channel_ ? limits::kCalls : limits::kAnswer);
  const uint64_t first = std::min(
      about, current_.sequence - std::min(current_.sequence, kAnnouncements - kMaxSlots - 1));
  const bool losses_allowed = channel_ || goes_on_within_;
  Nanos next_ask = 0;
  PeerTable::Census found = peers_.census(first, current_.sequence, other, sent, losses_allowed);
  while (!found.complete && !failed() && now() < until) {
    if (channel_ && now() >= next_ask) {
      channel_->askForProgress(first);
      next_ask = now() + kCensusPeriod;
    }
    sleepMillisecond();
    // A rank that only sends runs ahead, and its later announcements replace what was found.
    PeerTable::Census again = peers_.census(first, current_.sequence, other, sent, losses_allowed);
    if (again.parties.size() > 1 || found.parties.size() < 2) found = std::move(again);
  }
  fail(differs(peers_, std::move(found), other, sent));
}

// ---- ranks of other hosts

void Arbiter::onProcessEnded(int rank, const std::string& how) {
  peers_.recordLost({rank}, Observed::kEnded, how);
  wakeAll();
}

void Arbiter::onPeersLost(const std::vector<int>& ranks, Observed observed,
                          const std::string& how) {
  peers_.recordLost(ranks, observed, how);
  for (int r : ranks) peers_.checkDrained(r);
  wakeAll();
}

void Arbiter::onDeparture(int rank, Declared how) {
  std::atomic_ref(page(rank).departed).store(static_cast<uint32_t>(how), std::memory_order_release);
  peers_.checkDrained(rank);
  wakeAll();
}

void Arbiter::onDisconnect(int rank, const std::string& how, bool damaged) {
  peers_.checkDrained(rank);
  wakeAll();
  if (!peers_.recordDisconnect(rank)) return;
  // Both ranks may be healthy, and the network between them broken: no other rank sees that.
  channel_->callLater(damaged ? 0 : limits::kNewsOfRing, [this, rank, how] {
    if (!peers_.known(rank).isHere() || peers_.known(rank_).declared == Declared::kGone) return;
    decide({.kind = Failure::kPeerLost,
            .culprit = rank,
            .reporter = rank_,
            .text = peers_.who(rank) + " is lost: " + how});
  });
}

void Arbiter::onRemoteError(const GroupFailure& failure) {
  decide(failure);
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
