// Who is to blame: how far the others are, who holds up whom, and who is in the minority of a
// mismatch.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>
#include <utility>

#include "base/text.h"
#include "bootstrap/process.h"
#include "health/session.h"

namespace ringreduce {
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

Session::Census Session::census(uint64_t first, int other, const Announcement* sent) const {
  const std::lock_guard lock(mirror_mutex_);
  Census found;
  for (found.sequence = first;; ++found.sequence) {
    const uint64_t sequence = found.sequence;
    found.parties.clear();
    for (int r = 0; r < size_; ++r) {
      const Announcement* theirs = nullptr;
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

void Session::mismatch(int other, const Announcement* sent, uint64_t about) {
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

}  // namespace ringreduce
