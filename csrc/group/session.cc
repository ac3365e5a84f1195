// Polling, verdicts and their texts.
#include "group/session.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>

#include "base/hash.h"
#include "base/log.h"
#include "group/process.h"
#include "group/text.h"
#include "wire/wait.h"

namespace ringreduce {
namespace {

// How long a rank that found a mismatch waits for the rest, to tell who is in the minority.
constexpr Nanos kCensus = 300 * kMillisecond;

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

Session::Session(int rank, const Membership& membership, const GroupOptions& options)
    : rank_(rank), size_(static_cast<int>(membership.members.size())), options_(options) {
  for (const Member& member : membership.members) {
    pages_.push_back(reinterpret_cast<Page*>(member.segment->data()));
    processes_.push_back(member.process);
    names_.push_back("pid " + std::to_string(member.pid) + " on host " + member.host);
    pids_.push_back(member.pid);
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
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    ring(page(r), rank_);
    ringBell(page(r).messenger_bell);
  }
}

std::vector<bool> Session::endedProcesses() const {
  return ended(processes_);
}

// The words in which monitored_barrier is known to tell who did not come, and who looked.
std::string Session::monitored(const std::vector<int>& late) const {
  const long ms = timeout_ / kMillisecond;
  std::string text = late.size() > 1 ? "Ranks " : "Rank ";
  for (size_t i = 0; i < late.size(); ++i) text += (i > 0 ? ", " : "") + options_.shown(late[i]);
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
  if (isStopped(pids_[static_cast<size_t>(r)])) text += ", stopped";
  const uint64_t done = page(r).announced.observe();
  text += done == 0 ? ", no operation so far"
                    : ", last seen in " + told(page(r).announcements[(done - 1) % kAnnouncements]);
  return text;
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
    if (isStopped(pids_[static_cast<size_t>(r)])) stopped.push_back(r);
  return stopped;
}

// ---- while waiting

void Session::poll(int rank, Ready ready) {
  if (failed()) throwVerdict();
  if (inline_ && options_.interrupt) options_.interrupt();
  if (!inline_ && options_.interrupted && options_.interrupted(started_))
    fail(Failure::kAborted, rank_,
         who(rank_) + " aborted group '" + options_.name + "': interrupted in " + told(current_));
  for (int r = 0; r < size_; ++r)
    if (r != rank_ && hasAnnounced(r)) verify(r);
  const std::vector<bool> gone = endedProcesses();
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || !(gone[static_cast<size_t>(r)] || hasDeparted(r))) continue;
    // A rank that is gone is missed if it never came to this operation, or if what this wait is for
    // was its to do.  Whatever it did before it went is in memory by now, so look once more.
    if ((!hasAnnounced(r) || r == rank) && !ready()) lost(r, gone[static_cast<size_t>(r)]);
  }
  const Nanos time = now();
  if (time >= deadline_ && !ready()) {
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

void Session::verify(int rank) {
  if (page(rank).announcements[current_.sequence % kAnnouncements] != current_) mismatch();
}

// ---- who is to blame

// Every flag that rank r moves, wherever it lies: how far it has come.
uint64_t Session::progressOf(int r) const {
  Page& own = page(r);
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
  return last;
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
  // All have come: a stopped process is to blame, else the one that has got least far.
  int slowest = waited_for;
  bool stopped = false;
  for (int r = 0; r < size_ && !stopped; ++r) {
    if (r == rank_) continue;
    stopped = isStopped(pids_[static_cast<size_t>(r)]);
    if (stopped || progressOf(r) < progressOf(slowest)) slowest = r;
  }
  late.ranks = {slowest};
  late.text = who(slowest) + " arrived but stopped moving data" +
              (stopped ? ": its process is stopped" : "");
  return late;
}

void Session::lost(int rank, bool process_ended) {
  fail(Failure::kPeerLost, rank,
       who(rank) + (process_ended ? " is lost: its process ended" : " has left the group") +
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

void Session::mismatch() {
  // Let the others arrive, so that the majority can be told from the minority.
  const Nanos until = deadlineIn(kCensus);
  const auto all_here = [&] {
    for (int r = 0; r < size_; ++r)
      if (!hasAnnounced(r)) return false;
    return true;
  };
  while (!all_here() && !failed() && now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));

  struct Party {
    Announcement operation;
    std::vector<int> ranks;
  };
  // The first operation that they disagree about: this one, or one that this rank did not wait in.
  std::vector<Party> parties;
  uint64_t sequence =
      current_.sequence - std::min(current_.sequence, kAnnouncements - kMaxSlots - 1);
  for (; sequence <= current_.sequence; ++sequence) {
    parties.clear();
    for (int r = 0; r < size_; ++r) {
      if (!hasAnnounced(r)) continue;
      const Announcement& theirs = page(r).announcements[sequence % kAnnouncements];
      auto party = std::find_if(parties.begin(), parties.end(),
                                [&](const Party& p) { return p.operation == theirs; });
      if (party == parties.end()) party = parties.insert(party, {theirs, {}});
      party->ranks.push_back(r);
    }
    if (parties.size() > 1) break;
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

// ---- the verdict

void Session::report(Failure kind, int culprit, const std::string& text) {
  if (!failed()) {
    Page& own = page(rank_);
    // Only one thread of this rank reports: whoever else finds the word taken.
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    if (!failed()) {
      std::strncpy(own.record, text.c_str(), sizeof own.record - 1);
      uint64_t none = 0;
      verdict().compare_exchange_strong(none, pack(kind, culprit, rank_),
                                        std::memory_order_acq_rel);
    }
  }
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
