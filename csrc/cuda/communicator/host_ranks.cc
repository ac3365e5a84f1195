// What the pages of a host's ranks say of their streams.
#include "cuda/communicator/host_ranks.h"

#include <algorithm>
#include <atomic>
#include <type_traits>

#include "base/limits.h"
#include "cuda/kernels/ordering.h"

namespace ringreduce::cuda {
namespace {

template <class T>
void set(T& word, std::type_identity_t<T> value) {
  std::atomic_ref(word).store(value, std::memory_order_release);
}
template <class T>
T get(T& word) {
  return std::atomic_ref(word).load(std::memory_order_acquire);
}

}  // namespace

uint32_t ToldLocations::tell(Location& where, uint64_t number, bool captured) {
  if (where.in.segment == 0 && where.out.segment == 0) return kInHalf;
  size_t place = 0;
  while (place < uses_.size() && !(own_.told[place] == where)) ++place;
  if (place == uses_.size() && place < most_) {
    uses_.push_back({});
    own_.told[place] = where;
  } else if (place == uses_.size()) {
    const uint64_t finished = own_.finished.observe();
    // After a failure a call that was released has finished, and late leaders may still look.
    const bool failed = own_.abort.isSet(0);
    for (place = 0; place < uses_.size(); ++place)
      if (!failed && !uses_[place].captured && uses_[place].last < finished) break;
    if (place == uses_.size()) {
      where.in = where.out = {};
      return kInHalf;
    }
    own_.told[place] = where;
  }
  uses_[place] = {number, captured || uses_[place].captured};
  return kInHalf + 1 + static_cast<uint32_t>(place);
}

HostRanks::HostRanks(const Group& group, std::vector<HostState*> states)
    : group_(group), states_(std::move(states)), compared_(states_.size()) {
  for (int half = 0; half < kHalves; ++half)
    for (int r = 0; r < group_.size(); ++r) set(wordOf(Word::kFree, half, r), 1);
}

void HostRanks::announce(const OpSignature& what) {
  set(own().arrivals[what.sequence % kRemembered].at, 0);
  own().announcements[what.sequence % kRemembered].set(what);
  own().announced.publish(what.sequence + 1);
}

void HostRanks::advance(uint64_t finished, const Operations&) {
  own().finished.publish(finished);
}

void HostRanks::arrive(uint64_t number, const StreamArrival& arrival) {
  StreamArrival& own_one = own().arrivals[number % kRemembered];
  set(own_one.error, arrival.error);
  set(own_one.at, arrival.at);
}

StreamArrival HostRanks::arrivalOf(int rank, uint64_t number) const {
  StreamArrival& theirs = state(rank).arrivals[number % kRemembered];
  if (announcedBy(rank) <= number) return {};
  StreamArrival found{.at = get(theirs.at)};
  found.error = get(theirs.error);
  // It may have been overwritten while it was read.
  if (announcedBy(rank) >= number + kRemembered) return {.at = kNever};
  return found;
}

std::optional<WatchedRanks::Difference> HostRanks::findDifference(const Operations&) {
  const uint64_t announced = own().announced.observe();
  for (int r = 0; r < group_.size(); ++r) {
    if (r == group_.rank()) continue;
    uint64_t& n = compared_[static_cast<size_t>(r)];
    const uint64_t theirs = announcedBy(r);
    const uint64_t both = std::min(theirs, announced), ahead = std::max(theirs, announced);
    // The history of the next announcement covers the overwritten ones.
    if (ahead > kRemembered - 1) n = std::max(n, std::min(both, ahead - (kRemembered - 1)));
    for (; n < both; ++n) {
      const OpSignature ours = announcementOf(group_.rank(), n), other = announcementOf(r, n);
      // It may have been overwritten while it was read.
      if (announcedBy(r) >= n + kRemembered) break;
      if (ours != other) return Difference{r, ours, other};
    }
  }
  // Replays of graphs announce nothing.
  Trouble& trouble = own().trouble;
  if (observeWord(trouble.cause) == static_cast<uint64_t>(Cause::kMismatch))
    return Difference{trouble.peer, announcementOf(group_.rank(), trouble.operation),
                      announcementOf(trouble.peer, trouble.operation)};
  return std::nullopt;
}

std::optional<WatchedRanks::Late> HostRanks::findLate(const Operations& under_way) {
  auto late = lateKernel(under_way);
  return late ? late : lateStream(under_way);
}

// A kernel that waits for its peers keeps its deadline itself.
std::optional<WatchedRanks::Late> HostRanks::lateKernel(const Operations& under_way) const {
  Trouble& trouble = own().trouble;
  if (observeWord(trouble.cause) != static_cast<uint64_t>(Cause::kTimeout)) return std::nullopt;
  Nanos timeout = group_.timeout();
  for (const StreamOperation& operation : under_way)
    if (operation.what.sequence == trouble.operation) timeout = operation.timeout;
  return Late{announcementOf(group_.rank(), trouble.operation), timeout, trouble.peer,
              " (channel " + std::to_string(trouble.channel) + ", step " +
                  std::to_string(trouble.step) + ")"};
}

// The deadline of the direct schedule: the stream is in a schedule and has ended none for that
// long.
std::optional<WatchedRanks::Late> HostRanks::lateStream(const Operations& under_way) {
  const uint64_t delivered = observeWord(own().delivered);
  const Nanos time = now();
  const bool busy = get(own().busy) != 0;
  if (!busy || !was_busy_ || delivered != delivered_) {
    was_busy_ = busy;
    delivered_ = delivered;
    delivered_since_ = time;
    return std::nullopt;
  }
  // A replayed CUDA graph is under way unknown to the host.
  const bool known = !under_way.empty();
  const Nanos timeout = known ? under_way.front().timeout : group_.timeout();
  if (time - delivered_since_ < timeout) return std::nullopt;
  return Late{
      known ? under_way.front().what : announcementOf(group_.rank(), own().announced.observe() - 1),
      timeout};
}

Finding HostRanks::blameForDelay(const OpSignature& what, int waited_for) const {
  const int r = waited_for >= 0 ? waited_for : missingWord(what);
  return {Failure::kTimeout,
          {r},
          epoch_->peers().whereabouts({r}) +
              " came, but did not do its part (or could not, for want of another's)"};
}

// The rank whose word this rank's stream waits for, or else any other.  In a broadcast all ranks
// wait for the root, and the root until they have read what it staged before.  A rank that came set
// `ready`, and one that is through with this rank's half set `free`.
int HostRanks::missingWord(const OpSignature& what) const {
  if (what.root != kNoRoot && what.root != group_.rank()) return what.root;
  for (int half = 0; half < kHalves; ++half)
    for (int r = 0; r < group_.size(); ++r)
      if (r != group_.rank() && get(wordOf(Word::kReady, half, r)) == 0 &&
          get(wordOf(Word::kFree, half, r)) == 0)
        return r;
  // The only leader of an all-reduce takes no `free`.  Where some rank has staged, others should.
  for (int half = 0; half < kHalves; ++half) {
    const auto has_staged = [&](int r) {
      return r != group_.rank() && get(wordOf(Word::kReady, half, r)) != 0;
    };
    bool some = false;
    for (int r = 0; r < group_.size(); ++r) some = some || has_staged(r);
    for (int r = 0; some && r < group_.size(); ++r)
      if (r != group_.rank() && !has_staged(r)) return r;
  }
  return (group_.rank() + 1) % group_.size();
}

bool HostRanks::isDone(int rank, uint64_t operations) const {
  bool has_read = true;
  for (int half = 0; half < kHalves && rank != group_.rank(); ++half)
    has_read = has_read && get(wordOf(Word::kFree, half, rank)) != 0;
  return has_read && state(rank).finished.observe() >= operations;
}

Nanos HostRanks::lossPatience(bool came) const {
  return came ? limits::kLastWork : 0;
}

// Ends the waits of this rank's kernels and streams.  It is repeated, since a queued write of a
// peer may undo it.  The copies of the abort flag by which outputs are poisoned come first, of all
// ranks: a rank that skips its part, or whose stream is released, tells its peers that it is done,
// and their outputs must be poisoned even before their own watchdogs notice.
void HostRanks::release() {
  for (HostState* one : states_) one->abort.setFirst();
  for (HostState* one : states_) one->abort.set();
  for (StreamWord& line : own().words) set(line.word, kReleased);
}

}  // namespace ringreduce::cuda
