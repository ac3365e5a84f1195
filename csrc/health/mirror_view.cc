// Questions to ranks of other hosts, and news of them.
#include "health/mirror_view.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "transport/shm/wait.h"

namespace ringreduce {

// ---- questions

std::vector<int> MirrorView::lostFor(Nanos time) const {
  std::vector<int> lost;
  for (int r = 0; r < size_; ++r)
    if (known(r).isLost() && now() - peer(r).lost_since >= time) lost.push_back(r);
  return lost;
}

int MirrorView::waitsFor(int rank) const {
  return now() - peer(rank).last_progress > limits::kTold ? -1 : peer(rank).waits_for.load();
}

int MirrorView::heldUpBy(int rank) const {
  // A stopped rank may have received by now what it waited for.
  for (int steps = 0; steps < size_ && !isStopped(rank); ++steps) {
    const int next = waitsFor(rank);
    if (next < 0 || next == rank_) break;
    rank = next;
  }
  return rank;
}

// All ranks that wait need the progress of the others, and all receive the answers to one question.
// So the first rank asks, and each other one a little later than the rank before it, if none did.
Nanos MirrorView::askAgain(Nanos time) const {
  const Nanos next = last_answer_ + kSecond + kSecond * rank_ / size_;
  if (time < next) return next;
  ask(kNoOperation);
  return time + kSecond;
}

bool MirrorView::await(const std::vector<int>& ranks, uint64_t since, Nanos least,
                       const std::function<bool()>& over) const {
  const Nanos asked = now(), until = asked + limits::kAnswer;
  ask(since);
  const auto answered = [&] {
    // Ranks do not repeat an answer at once.
    return std::ranges::all_of(ranks,
                               [&](int r) { return peer(r).last_progress >= asked - kSecond / 2; });
  };
  while ((now() < asked + least || !answered()) && !over() && now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return answered();
}

void MirrorView::wakeMessenger(int rank) {
  uint32_t* const word = peer(rank).seat.messenger_word;
  if (!word) return channel_.wakePeer(rank);
  if (std::atomic_ref(*word).load(std::memory_order_seq_cst)) wakeSleeper(*word);
}

// ---- news

// An open connection may carry more of what a rank sent before it ended or left.
void MirrorView::checkDrained(int rank) {
  const PeerState state = known(rank);
  const bool sends_no_more =
      state.declared == Declared::kGone || state.observed == Observed::kEnded;
  if (sends_no_more && !channel_.mayReceiveFrom(rank)) peer(rank).drained = true;
}

void MirrorView::onPeersLost(const std::vector<int>& ranks, Observed observed,
                             const std::string& how) {
  recordLost(ranks, observed, how);
  for (int r : ranks) checkDrained(r);
  wakeAll();
}

void MirrorView::onDeparture(int rank, Declared how) {
  std::atomic_ref(page(rank).departed).store(static_cast<uint32_t>(how), std::memory_order_release);
  checkDrained(rank);
  wakeAll();
}

void MirrorView::onDisconnect(int rank, const std::string& how, bool damaged) {
  checkDrained(rank);
  wakeAll();
  if (disconnected_[static_cast<size_t>(rank)]) return;
  disconnected_[static_cast<size_t>(rank)] = true;
  // Both ranks may be healthy, and the network between them broken: no other rank sees that.
  channel_.callLater(damaged ? 0 : limits::kNewsOfRing, [this, rank, how] {
    if (known(rank).isHere() && known(rank_).declared != Declared::kGone)
      decide_({.kind = Failure::kPeerLost,
               .culprit = rank,
               .reporter = rank_,
               .text = who(rank) + " is lost: " + how});
  });
}

void MirrorView::onClock(const ClockOffset& offset) {
  ahead_ = offset.ahead;
  clock_error_ = offset.error;
}

void MirrorView::onProgress(int rank, const net::Progress& progress) {
  for (const Announcement& one : progress.earlier) record(rank, one.sequence, one);
  if (progress.announced > 0) record(rank, progress.announced - 1, progress.last);
  const std::lock_guard lock(mutex_);
  Peer& one = peer(rank);
  one.waits_for = progress.waits_for;
  one.streams = progress.streams;
  if (!progress.stopped) one.heard = now();
  if (!known(rank).isLost()) one.observed = progress.stopped ? Observed::kStopped : Observed::kHere;
  last_answer_ = one.last_progress = now();
}

net::Progress MirrorView::ownProgress(uint64_t since) {
  const std::lock_guard lock(mutex_);
  RankPage& own = page(rank_);
  net::Progress progress;
  progress.waits_for = awaited_rank_.load(std::memory_order_relaxed);
  if (progress.waits_for < 0) progress.waits_for = awaitedMessageOf(rank_).peer;
  progress.streams = peer(rank_).streams;
  progress.announced = own.announced.observe();
  const uint64_t announced = progress.announced;
  if (announced == 0) return progress;
  progress.last = own.announcements[(announced - 1) % kAnnouncements];
  since = std::max(since, announced - std::min(announced, kAnnouncements));
  for (; since < announced - 1; ++since)
    progress.earlier.push_back(own.announcements[since % kAnnouncements]);
  return progress;
}

std::vector<int> MirrorView::stoppedOnHost() {
  std::vector<int> stopped;
  for (int r = 0; r < size_; ++r)
    if (r != rank_ && peer(r).seat.pid != 0 && isStopped(r)) stopped.push_back(r);
  return stopped;
}

}  // namespace ringreduce
