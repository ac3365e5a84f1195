// How the session polls, sets the verdict and words it; how it finds the rank to blame; and how it
// takes news from other hosts.
#include "health/session.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "base/op_signature.h"
#include "base/text.h"
#include "bootstrap/process.h"
#include "transport/shm/wait.h"

namespace ringreduce {

// ---- polling and verdicts

namespace {

// After a connection ended: how long to wait for news of the other rank before reporting it.
constexpr Nanos kHearsay = 600 * kMillisecond;

constexpr uint64_t pack(Failure kind, int culprit, int reporter) {
  return static_cast<uint64_t>(kind) << 48 | static_cast<uint64_t>(culprit) << 24 |
         static_cast<uint64_t>(reporter);
}

// A rank that does not wait for another in an operation (the root of a broadcast) does not see what
// the other called there.  So each announcement carries this hash of all before it, and a
// difference shows at the next operation at the latest.
uint64_t extended(uint64_t history, const OpSignature& a) {
  for (uint64_t word : {a.count, static_cast<uint64_t>(a.kind), static_cast<uint64_t>(a.dtype),
                        static_cast<uint64_t>(a.op), static_cast<uint64_t>(a.root), a.parts})
    history = mixed(history, word);
  return history;
}

}  // namespace

std::vector<Seat> seatsOf(const Membership& membership) {
  std::vector<Seat> seats;
  for (const Member& member : membership.members)
    seats.push_back({.page = reinterpret_cast<RankPage*>(member.segment->data()),
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

void Session::begin(const OpSignature& operation, Nanos timeout, bool in_users_thread) {
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
  RankPage& own = page(rank_);
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
std::string Session::told(OpSignature operation) const {
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
  OpSignature last;
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
      const OpSignature& theirs = page(r).announcements[at];
      const OpSignature& own = page(rank_).announcements[at];
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

void Session::verify(int rank, const OpSignature& theirs) {
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
  RankPage& theirs = page(reporter);
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

// ---- blame
//
// Who is to blame: how far the others are, who holds up whom, and who is in the minority of a
// mismatch.

namespace {

// As kCensus between hosts, and how often it asks meanwhile: who has just come has more to tell.
constexpr Nanos kCensusApart = kSecond, kCensusAgain = 50 * kMillisecond;
// So long it reads what has come already, before it believes that it knows how far the others are.
constexpr Nanos kMail = 20 * kMillisecond;

}  // namespace

void Session::hearOthers() const {
  if (!outside_) return check();
  const Nanos asked = now(), until = asked + kCensus;
  outside_->ask();
  const auto all_said = [&] {
    for (int r = 0; r < size_; ++r)
      if (r != rank_ && distant_[static_cast<size_t>(r)].seen < asked - kSecond / 2) return false;
    return true;
  };
  while ((now() < asked + kMail || !all_said()) && !failed() && now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  check();
}

// Every flag that rank r moves, wherever it lies: how far it has come.
uint64_t Session::progressOf(int r) const {
  RankPage& own = page(r);
  return own.posted.observe() + own.reduced.observe() + own.done.observe() +
         page((r + 1) % size_).inbound.observe() + page((r + size_ - 1) % size_).outbound.observe();
}

// Those to blame among ranks that have not come.  This rank may be several operations ahead, and of
// the others one may be held up by another: by one that is stopped, or by one that has come less
// far.
std::vector<int> Session::lastOf(const std::vector<int>& absent) const {
  std::vector<int> last = stoppedOf(absent);
  if (!last.empty()) return last;
  uint64_t least = UINT64_MAX;
  for (int r : absent) {
    const uint64_t come = page(r).announced.observe();
    if (come > least) continue;
    if (come < least) last.clear();
    least = come;
    last.push_back(r);
  }
  // One of these may have come no further only because it waits for another of them.
  std::vector<int> free = last;
  std::erase_if(free, [&](int r) { return heldUpBy(r) != r; });
  return free.empty() ? last : free;
}

int Session::heldUpBy(int r) const {
  // What a stopped rank waited for it may have by now.
  for (int steps = 0; outside_ && steps < size_ && !isStoppedRank(r); ++steps) {
    const Distant& there = distant_[static_cast<size_t>(r)];
    const int next = there.waits_for;
    if (next < 0 || next == rank_ || now() - there.seen > 3 * kSecond) break;
    r = next;
  }
  return r;
}

Session::Laggards Session::laggards(int waited_for) const {
  Laggards late;
  std::vector<int> absent;
  for (int r = 0; r < size_; ++r)
    if (r != rank_ && !hasAnnounced(r)) absent.push_back(r);
  if (!absent.empty()) {
    late.ranks = current_.kind == Kind::kMonitoredBarrier ? absent : lastOf(absent);
    late.text = whereabouts(late.ranks) + " did not arrive";
    std::erase_if(absent, [&](int r) { return std::ranges::count(late.ranks, r) > 0; });
    if (!absent.empty()) late.text += "; late too: " + whereabouts(absent);
    return late;
  }
  // All have come: a stopped process is to blame, else the one that has got least far, or between
  // hosts the end of the chain in which one waits for another.
  int slowest = waited_for;
  bool stopped = false;
  for (int r = 0; r < size_ && !stopped; ++r) {
    if (r == rank_) continue;
    stopped = isStoppedRank(r);
    if (stopped || (!outside_ && progressOf(r) < progressOf(slowest))) slowest = r;
  }
  if (!stopped) slowest = heldUpBy(slowest);
  late.ranks = {slowest};
  late.text = who(slowest) + " arrived but stopped moving data" +
              (stopped ? ": its process is stopped" : "");
  return late;
}

void Session::lost(int rank, bool process_ended) {
  fail(Failure::kPeerLost, rank,
       who(rank) +
           (process_ended ? std::string(" is lost: ") + kProcessEnded : " has left the group") +
           (hasAnnounced(rank) ? " during " : " before it came to ") + told(current_));
}

void Session::disagree(int sender, int receiver, uint64_t sent, uint64_t expected) {
  const auto elements = [](uint64_t n) {
    return std::to_string(n) + (n == 1 ? " element" : " elements");
  };
  fail(Failure::kMismatch, sender,
       "ranks disagree on " + told(current_) + ": rank " + options_.shown(sender) + " sends " +
           elements(sent) + " to rank " + options_.shown(receiver) + ", which expects " +
           elements(expected));
}

Session::Census Session::census(uint64_t first, int other, const OpSignature* sent) const {
  const std::lock_guard lock(mirror_mutex_);
  Census found;
  for (found.sequence = first;; ++found.sequence) {
    const uint64_t sequence = found.sequence;
    found.parties.clear();
    for (int r = 0; r < size_; ++r) {
      const OpSignature* theirs = nullptr;
      if (page(r).announced.observe() > sequence) {
        theirs = &page(r).announcements[sequence % kAnnouncements];
        // Of an operation a mirror may hold nothing, or nothing any more.
        if (outside_ && theirs->sequence != sequence) {
          const bool over = theirs->sequence != kNoOperation && theirs->sequence > sequence;
          found.complete = found.complete && (over || stateOf(r) != PeerState::kHere);
          theirs = nullptr;
        }
      } else {
        found.complete = found.complete && outside_ && stateOf(r) != PeerState::kHere;
      }
      if (!theirs && sent && r == other && sequence == current_.sequence) theirs = sent;
      if (!theirs) continue;
      auto party = std::find_if(found.parties.begin(), found.parties.end(),
                                [&](const Party& p) { return p.operation == *theirs; });
      if (party == found.parties.end())
        party = found.parties.insert(party, {.operation = *theirs, .ranks = {}});
      party->ranks.push_back(r);
    }
    if (found.parties.size() > 1 || sequence == current_.sequence) return found;
  }
}

void Session::mismatch(int other, const OpSignature* sent, uint64_t about) {
  // Let the others tell, so that the majority can be told from the minority.  They may disagree
  // about this operation, or about one in which this rank did not wait.
  const Nanos until = deadlineIn(outside_ ? kCensusApart : kCensus);
  const uint64_t first = std::min(
      about, current_.sequence - std::min(current_.sequence, kAnnouncements - kMaxSlots - 1));
  Nanos next_ask = 0;
  Census found = census(first, other, sent);
  while (!found.complete && !failed() && now() < until) {
    if (outside_ && now() >= next_ask) {
      outside_->ask(first);
      next_ask = now() + kCensusAgain;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    // Whoever only gives runs ahead, and what it has announced since covers what was found.
    Census again = census(first, other, sent);
    if (again.parties.size() > 1 || found.parties.size() < 2) found = std::move(again);
  }
  auto& [sequence, parties, complete] = found;
  // All say that they called the same, but this rank's data were of something else.
  if (parties.size() == 1 && sent) {
    std::erase(parties[0].ranks, other);
    parties.push_back({.operation = *sent, .ranks = {other}});
  }
  // The largest party is right; of equal ones that with the lowest rank, which comes first.
  const auto right = std::max_element(
      parties.begin(), parties.end(),
      [](const Party& a, const Party& b) { return a.ranks.size() < b.ranks.size(); });
  std::string text = "ranks disagree on operation #" + std::to_string(sequence) + ": ";
  int culprit = -1;
  for (const Party& party : parties) {
    if (party.ranks == right->ranks) continue;
    if (culprit < 0) culprit = party.ranks.front();
    text += rankList(options_.shownAs(party.ranks)) + " called " + told(party.operation) + ", ";
  }
  if (culprit < 0) culprit = rank_;  // cannot be: a mismatch makes two parties at least
  text += "where " + rankList(options_.shownAs(right->ranks)) + " called " + told(right->operation);
  fail(Failure::kMismatch, culprit, text);
}

// ---- ranks of other hosts
//
// What is heard of ranks of other hosts: their pages are mirrored here.

// `theirs` as announcement number `sequence` of that rank's mirror.
void Session::mirror(int rank, uint64_t sequence, const OpSignature& theirs) {
  const std::lock_guard lock(mirror_mutex_);
  RankPage& there = page(rank);
  OpSignature& known = there.announcements[sequence % kAnnouncements];
  // What is heard late does not take the place of what came after it.
  if (known.sequence != kNoOperation && known.sequence > sequence) return;
  known = theirs;
  if (there.announced.observe() <= sequence) there.announced.publish(sequence + 1);
}

void Session::learn(Failure kind, int culprit, int reporter, const std::string& text) {
  {
    const std::lock_guard lock(mirror_mutex_);
    if (failed()) return;
    decide(kind, culprit, reporter, text);
  }
  wakeAll();
}

void Session::lose(const std::vector<int>& ranks, PeerState fate, const std::string& how) {
  {
    const std::lock_guard lock(mirror_mutex_);
    for (int r : ranks) {
      Distant& there = distant_[static_cast<size_t>(r)];
      if (there.fate != PeerState::kHere) continue;
      there.how = how;
      std::vector<int> others = ranks;
      std::erase(others, r);
      if (!others.empty())
        there.how += "; nor can " + rankList(options_.shownAs(others)) + " be reached";
      there.lost_since = now();
      there.fate = fate;
    }
  }
  wakeAll();
}

void Session::learnDeparture(int rank, Departure how) {
  {
    const std::lock_guard lock(mirror_mutex_);
    Distant& there = distant_[static_cast<size_t>(rank)];
    if (how == Departure::kGone) {
      there.gone = true;
      if (!there.heard_out) how = Departure::kLeaving;
    }
    std::atomic_ref(page(rank).departed)
        .store(static_cast<uint32_t>(how), std::memory_order_release);
  }
  wakeAll();
}

void Session::hearOut(int rank) {
  {
    const std::lock_guard lock(mirror_mutex_);
    Distant& there = distant_[static_cast<size_t>(rank)];
    there.heard_out = true;
    if (there.gone)
      std::atomic_ref(page(rank).departed)
          .store(static_cast<uint32_t>(Departure::kGone), std::memory_order_release);
  }
  wakeAll();
}

void Session::miss(int rank, const std::string& how) {
  if (stateOf(rank) != PeerState::kHere || departureOf(rank_) == Departure::kGone) return;
  report(Failure::kPeerLost, rank, who(rank) + " is lost: " + how);
}

void Session::see(int rank, uint64_t announced, const OpSignature& last, int waits_for,
                  bool stopped, const std::vector<OpSignature>& earlier) {
  for (const OpSignature& one : earlier) mirror(rank, one.sequence, one);
  if (announced > 0) mirror(rank, announced - 1, last);
  Distant& there = distant_[static_cast<size_t>(rank)];
  there.waits_for = waits_for;
  there.stopped = stopped;
  last_answer_ = there.seen = now();
}

void Session::here(uint64_t& announced, OpSignature& last, uint64_t since,
                   std::vector<OpSignature>& earlier) const {
  const std::lock_guard lock(mirror_mutex_);
  RankPage& own = page(rank_);
  announced = own.announced.observe();
  if (announced == 0) return;
  last = own.announcements[(announced - 1) % kAnnouncements];
  since = std::max(since, announced - std::min(announced, kAnnouncements));
  for (; since < announced - 1; ++since)
    earlier.push_back(own.announcements[since % kAnnouncements]);
}

}  // namespace ringreduce
