// States from processes, and the ranks that are killed or left out.
#include "health/shared_view.h"

#include <chrono>
#include <thread>
#include <utility>

#include "transport/shm/wait.h"

namespace ringreduce {

SharedView::SharedView(int rank, std::vector<Seat> seats, const GroupOptions& options,
                       bool survives)
    : PeerView(rank, std::move(seats), options, survives) {
  for (const Peer& one : peers_) processes_.push_back(one.seat.process);
  if (!leaves_out_) return;
  try {
    pulse_ = std::make_unique<Pulse>(page(rank_));
  } catch (const Error&) {
    depart(Declared::kGone);  // the others have made the group
    throw;
  }
}

// An ended process has passed full barriers of the kernel, so its stores are visible.  That loads
// after this function see them, on AArch64 too, follows from `observed`: its store comes after
// poll(), and known() loads it before the process's flags are read.
void SharedView::look() const {
  // First those that another rank has left out: it has done so to one that has ended, too.
  std::vector<bool> left_out(static_cast<size_t>(size_));
  for (int r = 0; r < size_ && leaves_out_; ++r)
    left_out[static_cast<size_t>(r)] = ringreduce::isLeftOut(page(r));
  const std::vector<bool> all = ended(processes_);
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || known(r).isLost()) continue;
    if (all[static_cast<size_t>(r)])
      recordLost({r}, Observed::kEnded, howEnded(peer(r).seat.process));
    else if (left_out[static_cast<size_t>(r)])
      recordLost({r}, Observed::kUnreachable, kDidNotAnswer);
  }
}

// The earlier writes of a rank that is gone are visible by now.
std::vector<int> SharedView::missing(uint64_t sequence, int waited_for) const {
  const std::vector<PeerState> all = states();
  std::vector<int> missing;
  for (int r = 0; r < size_; ++r)
    if (r != rank_ && !isAbsent(r) && !all[static_cast<size_t>(r)].isHere() &&
        (r == waited_for || !hasAnnounced(r, sequence)))
      missing.push_back(r);
  return missing;
}

// The sum of all flags that the rank has moved.
uint64_t SharedView::progressOf(int rank) const {
  RankPage& own = page(rank);
  return own.posted.observe() + own.reduced.observe() + own.done.observe() +
         page((rank + 1) % size_).inbound.observe() +
         page((rank + size_ - 1) % size_).outbound.observe();
}

void SharedView::announce(const Announcement& call) {
  RankPage& own = page(rank_);
  own.announcements[call.sequence % kAnnouncements] = call;
  own.announced.publish(call.sequence + 1);
}

void SharedView::wakeMessenger(int rank) {
  uint32_t& word = page(rank).messenger_wake_word;
  if (std::atomic_ref(word).load(std::memory_order_seq_cst)) wakeSleeper(word);
}

void SharedView::tellDeparture(Declared) {
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    wakeIfWaiting(page(r), rank_);
    wakeSleeper(page(r).messenger_wake_word);
  }
}

bool SharedView::evict(const std::vector<int>& ranks, const std::vector<int>& late, size_t least,
                       const std::function<bool()>& over, const std::string& why) {
  const Nanos began = now();
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
    return ranks.size() < lost.size() + least;
  };
  const std::string own = "rank " + options_.shown(rank_);
  bool killed = false, left_out = false;
  for (; now() < began + limits::kTimeToGoOn;
       std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
    if (over() ||
        std::ranges::any_of(ranks, [&](int r) { return r != rank_ && !stateOf(r).isHere(); }))
      return true;
    if (!killed && now() >= began + limits::kAnswer) {
      killed = true;
      if (!too_many(stoppedOf(ranks)))
        for (const int r : stoppedOf(late)) {
          log(own + " kills " + who(r) + ", which is stopped" + why);
          kill(peer(r).seat.process.pidfd);
        }
    }
    if (left_out || now() < began + limits::kAnswerAtDeadline) continue;
    left_out = true;
    std::vector<int> silent;
    for (size_t i = 0; i < ranks.size(); ++i)
      if (ranks[i] != rank_ && pulses(ranks[i]) == before[i]) silent.push_back(ranks[i]);
    if (too_many(silent)) break;
    for (const int r : silent) {
      log(own + " leaves " + who(r) + " out, whose process does not answer" + why);
      leaveOut(page(r));
    }
  }
  return over();
}

}  // namespace ringreduce
