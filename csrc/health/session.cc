// Polling, verdicts and their texts.  Who is to blame is found in session_blame.cc, and what is
// heard of other hosts comes in by session_outside.cc.
#include "health/session.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>

#include "base/hash.h"
#include "base/log.h"
#include "base/op_signature.h"
#include "base/text.h"
#include "bootstrap/process.h"
#include "transport/shm/wait.h"

namespace ringreduce {
namespace {

// How long who has lost a connection waits to hear what became of the other end.
constexpr Nanos kHearsay = 600 * kMillisecond;

constexpr uint64_t pack(Failure kind, int culprit, int reporter) {
  return static_cast<uint64_t>(kind) << 48 | static_cast<uint64_t>(culprit) << 24 |
         static_cast<uint64_t>(reporter);
}

// A rank that does not wait for another in an operation (the root of a broadcast) does not see what
// the other called there.  So each announcement carries this hash of all before it, and a
// difference shows at the next operation at the latest.
uint64_t extended(uint64_t history, const Announcement& a) {
  for (uint64_t word : {a.count, static_cast<uint64_t>(a.kind), static_cast<uint64_t>(a.dtype),
                        static_cast<uint64_t>(a.op), static_cast<uint64_t>(a.root), a.parts})
    history = mixed(history, word);
  return history;
}

}  // namespace

std::vector<Seat> seatsOf(const Membership& membership) {
  std::vector<Seat> seats;
  for (const Member& member : membership.members)
    seats.push_back({.page = reinterpret_cast<Page*>(member.segment->data()),
                     .process = member.process,
                     .name = "pid " + std::to_string(member.pid) + " on host " + member.host,
                     .pid = pidSeenHere(member.process)});
  return seats;
}

Session::Session(int rank, std::vector<Seat> seats, const GroupOptions& options, Outside* outside)
    : rank_(rank),
      size_(static_cast<int>(seats.size())),
      options_(options),
      outside_(outside),
      distant_(outside ? seats.size() : 0) {
  for (Seat& seat : seats) {
    pages_.push_back(seat.page);
    processes_.push_back(std::move(seat.process));
    names_.push_back(std::move(seat.name));
    pids_.push_back(seat.pid);
  }
}

void Session::begin(const Announcement& operation, Nanos timeout, bool in_users_thread) {
  current_ = operation;
  current_.history = history_;
  history_ = extended(history_, operation);
  inline_ = in_users_thread;
  in_monitored_barrier_ = operation.kind == Kind::kMonitoredBarrier;
  if (failed()) throwVerdict();
  started_ = now();
  timeout_ = timeout;
  deadline_ = deadlineIn(timeout);
  next_report_ = deadlineIn(options_.stall);
  // Before a word in the log about who is late.
  next_ask_ = std::min(started_ + kSecond, next_report_ - kCensus);
  waits_for_.store(-1, std::memory_order_relaxed);
  if (outside_) return mirror(rank_, operation.sequence, current_);
  Page& own = page(rank_);
  own.announcements[operation.sequence % kAnnouncements] = current_;
  own.announced.publish(operation.sequence + 1);
}

void Session::check() const {
  if (failed()) throwVerdict();
}

Departure Session::departureOf(int r) const {
  return static_cast<Departure>(std::atomic_ref(page(r).departed).load(std::memory_order_acquire));
}

void Session::depart(Departure how) {
  std::atomic_ref(page(rank_).departed)
      .store(static_cast<uint32_t>(how), std::memory_order_release);
  if (outside_) return outside_->depart(how);
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    ring(page(r), rank_);
    ringBell(page(r).messenger_bell);
  }
}

std::vector<bool> Session::endedProcesses() const {
  std::vector<bool> all = ended(processes_);
  for (size_t r = 0; r < distant_.size(); ++r) {
    const PeerState fate = distant_[r].fate;
    if (fate == PeerState::kUnreachable || (fate == PeerState::kEnded && distant_[r].heard_out))
      all[r] = true;
  }
  return all;
}

std::string Session::howLost(int r) const {
  const std::lock_guard lock(mirror_mutex_);
  if (!outside_ || distant_[static_cast<size_t>(r)].how.empty()) return kProcessEnded;
  return distant_[static_cast<size_t>(r)].how;
}

// The words in which monitored_barrier is known to tell who did not come, and who looked.
std::string Session::monitored(const std::vector<int>& late) const {
  const long ms = timeout_ / kMillisecond;
  std::string text = late.size() > 1 ? "Ranks " : "Rank ";
  text += joined(options_.shownAs(late), ", ");
  text += " failed to pass monitoredBarrier in " + std::to_string(ms) + " ms";
  if (late.size() > 1) text += ", Rank " + options_.shown(late.front()) + " first";
  return text + ". Rank " + options_.shown(rank_) + " timed out in monitoredBarrier";
}

// With the root's number as messages name it.
std::string Session::told(Announcement operation) const {
  if (operation.root != kNoRoot) operation.root = options_.shownAs(operation.root);
  return describe(operation);
}

std::string Session::who(int r) const {
  return "rank " + options_.shown(r) + " (" + names_[static_cast<size_t>(r)] + ")";
}

std::string Session::details(int r) const {
  std::string text = names_[static_cast<size_t>(r)];
  if (isStoppedRank(r)) text += ", stopped";
  const uint64_t done = page(r).announced.observe();
  if (done == 0) return text + ", no operation so far";
  Announcement last;
  {
    const std::lock_guard lock(mirror_mutex_);
    last = page(r).announcements[(done - 1) % kAnnouncements];
  }
  return text + ", last seen in " + told(last);
}

std::string Session::whereabouts(const std::vector<int>& ranks) const {
  std::string text = rankList(options_.shownAs(ranks)) + " (";
  for (int r : ranks) {
    if (r != ranks.front()) text += "; ";
    text += details(r);
  }
  return text + ")";
}

std::vector<int> Session::stoppedOf(const std::vector<int>& ranks) const {
  std::vector<int> stopped;
  for (int r : ranks)
    if (isStoppedRank(r)) stopped.push_back(r);
  return stopped;
}

bool Session::isStoppedRank(int r) const {
  const auto at = static_cast<size_t>(r);
  return (pids_[at] != 0 && isStopped(pids_[at])) || (outside_ && distant_[at].stopped);
}

void Session::ringMessenger(int r) {
  if (outside_) {
    if (r == rank_)
      ringBell(page(r).messenger_bell);
    else
      outside_->stir(r);
    return;
  }
  if (std::atomic_ref(page(r).messenger_bell).load(std::memory_order_seq_cst))
    ringBell(page(r).messenger_bell);
}

// ---- while waiting

void Session::poll(int rank, Ready ready) {
  if (failed()) throwVerdict();
  if (inline_ && options_.interrupt) options_.interrupt();
  if (!inline_ && options_.interrupted && options_.interrupted(started_))
    fail(Failure::kAborted, rank_,
         who(rank_) + " aborted group '" + options_.name + "': interrupted in " + told(current_));
  waits_for_.store(rank, std::memory_order_relaxed);
  if (outside_)
    pollApart();
  else
    pollTogether(rank, ready);
  const Nanos time = now();
  if (time >= deadline_ && !ready()) {
    hearOthers();
    if (outside_) compareWhereabouts();
    if (ready()) return;
    const Laggards late = laggards(rank);
    std::string text =
        late.text + ": " + told(current_) + " timed out after a timeout of " + seconds(timeout_);
    if (current_.kind == Kind::kMonitoredBarrier) text = monitored(late.ranks) + ". " + text;
    fail(Failure::kTimeout, late.ranks.front(), text);
  }
  if (time >= next_report_ && !ready()) {
    next_report_ = time + std::max(time - started_, kSecond);
    log("rank " + options_.shown(rank_) + " of group '" + options_.name + "' has waited " +
        seconds(time - started_) + " in " + told(current_) + ": " + laggards(rank).text);
  }
}

void Session::pollTogether(int rank, Ready ready) {
  for (int r = 0; r < size_; ++r)
    if (r != rank_ && hasAnnounced(r)) verify(r);
  const std::vector<bool> gone = endedProcesses();
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || !(gone[static_cast<size_t>(r)] || hasDeparted(r))) continue;
    // A rank that is gone is missed if it never came to this operation, or if what this wait is for
    // was its to do.  Whatever it did before it went is in memory by now, so look once more.
    if ((!hasAnnounced(r) || r == rank) && !ready()) lost(r, gone[static_cast<size_t>(r)]);
  }
}

// The rank that is awaited may be well, and wait for one that is lost, or compute for an hour.
void Session::idle(Ready ready) {
  for (int r = 0; r < size_ && outside_; ++r) {
    const Distant& there = distant_[static_cast<size_t>(r)];
    if (there.fate == PeerState::kHere || now() - there.lost_since < kHearsay || ready()) continue;
    broken(r, kProcessEnded);
  }
}

// Who is gone is told by the mesh, which knows what is still on its way from there.
void Session::pollApart() {
  compareWhereabouts();
  askNowAndThen();
}

// Ranks that wait for each other in different operations send nothing by which it would show.  Nor
// does one that waits for a rank that has gone on, as it had nothing to do there.  So each compares
// the last operation that it has heard of another rank with its own of that number; of two ranks
// that is the one that has come further.
void Session::compareWhereabouts() {
  for (int r = 0; r < size_; ++r) {
    bool differs = false;
    uint64_t sequence = 0;
    {
      const std::lock_guard lock(mirror_mutex_);
      const uint64_t announced = page(r).announced.observe();
      if (announced == 0) continue;
      const uint64_t at = (announced - 1) % kAnnouncements;
      const Announcement& theirs = page(r).announcements[at];
      const Announcement& own = page(rank_).announcements[at];
      differs = theirs.sequence == own.sequence && theirs != own;
      sequence = own.sequence;
    }
    if (differs) mismatch(r, nullptr, sequence);
  }
}

// All who wait want to know how far the others are, and what one asks all are told: so the first
// asks, and the rest, each a little later than the one before it, only where nobody did.
void Session::askNowAndThen() {
  const Nanos time = now();
  if (time < next_ask_) return;
  const Nanos next = last_answer_ + kSecond + kSecond * rank_ / size_;
  if (time < next) {
    next_ask_ = next;
    return;
  }
  next_ask_ = time + kSecond;
  outside_->ask();
}

void Session::verify(int rank) {
  if (page(rank).announcements[current_.sequence % kAnnouncements] != current_) mismatch(rank);
}

void Session::verify(int rank, const Announcement& theirs) {
  mirror(rank, theirs.sequence, theirs);
  if (theirs != current_) mismatch(rank, &theirs);
}

PeerState Session::stateOf(int rank) const {
  const Distant& there = distant_[static_cast<size_t>(rank)];
  if (there.fate != PeerState::kHere) return there.fate;
  return there.gone || hasDeparted(rank) ? PeerState::kLeft : PeerState::kHere;
}

void Session::broken(int rank, const std::string& how) {
  // Whoever knows more of it is about to say so.
  for (const Nanos until = deadlineIn(kHearsay);
       !failed() && stateOf(rank) == PeerState::kHere && now() < until;)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (failed()) throwVerdict();
  std::string told_how = how;
  if (distant_[static_cast<size_t>(rank)].fate != PeerState::kHere) {
    const std::lock_guard lock(mirror_mutex_);
    told_how = distant_[static_cast<size_t>(rank)].how;
  }
  fail(Failure::kPeerLost, rank,
       who(rank) +
           (stateOf(rank) == PeerState::kLeft ? " has left the group" : " is lost: " + told_how) +
           " during " + told(current_));
}

// ---- the verdict

void Session::report(Failure kind, int culprit, const std::string& text) {
  if (!failed()) {
    // Only one thread of this rank reports: whoever else finds the word taken.
    const std::lock_guard lock(mirror_mutex_);
    if (!failed()) {
      decide(kind, culprit, rank_, text);
      if (outside_) outside_->tell(kind, culprit, text);
    }
  }
  wakeAll();
}

// With the mirror's lock held.
void Session::decide(Failure kind, int culprit, int reporter, const std::string& text) {
  Page& theirs = page(reporter);
  std::strncpy(theirs.record, text.c_str(), sizeof theirs.record - 1);
  uint64_t none = 0;
  verdict().compare_exchange_strong(none, pack(kind, culprit, reporter), std::memory_order_acq_rel);
}

void Session::wakeAll() {
  for (int r = 0; r < size_; ++r) {
    wake(page(r));
    ringBell(page(r).messenger_bell);
  }
}

void Session::fail(Failure kind, int culprit, const std::string& text) {
  report(kind, culprit, text);
  throwVerdict();
}

void Session::abort(const std::string& why) {
  report(Failure::kAborted, rank_, who(rank_) + " aborted group '" + options_.name + "': " + why);
}

void Session::throwVerdict() const {
  const uint64_t word = verdict().load(std::memory_order_acquire);
  const auto kind = static_cast<Failure>(word >> 48);
  const auto reporter = static_cast<int>(word & 0xffffff);
  std::string text = page(reporter).record;
  if (kind != Failure::kMismatch && kind != Failure::kAborted)
    text += ", in group '" + options_.name + "'";
  text += "; noticed by rank " + options_.shown(reporter);
  if (reporter != rank_) text += ", learned by rank " + options_.shown(rank_);
  if (in_monitored_barrier_ && rank_ != 0)
    text += ". Rank " + options_.shown(rank_) +
            " successfully reached monitoredBarrier, but received errors while waiting for "
            "send/recv from rank " +
            options_.shown(0);
  text += ". The group has failed: destroy it and make a new one.";
  throw Error(kind, text);
}

}  // namespace ringreduce
