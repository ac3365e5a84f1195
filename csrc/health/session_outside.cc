// What is heard of ranks of other hosts: their pages are mirrored here.
#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

#include "base/text.h"
#include "health/session.h"

namespace ringreduce {

// `theirs` as announcement number `sequence` of that rank's mirror.
void Session::mirror(int rank, uint64_t sequence, const Announcement& theirs) {
  const std::lock_guard lock(mirror_mutex_);
  Page& there = page(rank);
  Announcement& known = there.announcements[sequence % kAnnouncements];
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

void Session::see(int rank, uint64_t announced, const Announcement& last, int waits_for,
                  bool stopped, const std::vector<Announcement>& earlier) {
  for (const Announcement& one : earlier) mirror(rank, one.sequence, one);
  if (announced > 0) mirror(rank, announced - 1, last);
  Distant& there = distant_[static_cast<size_t>(rank)];
  there.waits_for = waits_for;
  there.stopped = stopped;
  last_answer_ = there.seen = now();
}

void Session::here(uint64_t& announced, Announcement& last, uint64_t since,
                   std::vector<Announcement>& earlier) const {
  const std::lock_guard lock(mirror_mutex_);
  Page& own = page(rank_);
  announced = own.announced.observe();
  if (announced == 0) return;
  last = own.announcements[(announced - 1) % kAnnouncements];
  since = std::max(since, announced - std::min(announced, kAnnouncements));
  for (; since < announced - 1; ++since)
    earlier.push_back(own.announcements[since % kAnnouncements]);
}

}  // namespace ringreduce
