// Questions for progress by the control ring, and what the answers mean.
#include "cuda/internode/remote_ranks.h"

#include <algorithm>

#include "base/error.h"
#include "base/limits.h"
#include "base/text.h"

namespace ringreduce::cuda {
namespace {

// An operation that takes this long makes this rank ask the others for their progress, and again
// each time as long.
constexpr Nanos kAskAfter = kSecond, kAskAgain = 100 * kMillisecond;

}  // namespace

// How long this rank lets others report first.
Nanos RemoteRanks::turn() const {
  return limits::kTurns * group_.rank() / group_.size();
}

// Before the first report to the log, which names the ranks that are late.
Nanos RemoteRanks::askAfter() const {
  return std::clamp(group_.options().stall / 2, kAskAgain, kAskAfter);
}

void RemoteRanks::announce(const OpSignature& what) {
  own_.announced = what.sequence + 1;
  epoch_->peers().publishStreams(own_);
}

void RemoteRanks::advance(uint64_t, const Operations& under_way) {
  const uint64_t before = own_.oldest.sequence;
  own_.oldest = under_way.empty() ? OpSignature{.sequence = kNoOperation} : under_way.front().what;
  own_.begun = !under_way.empty() && under_way.front().begun_at != 0;
  if (own_.oldest.sequence != before) next_question_ = now() + askAfter();
  epoch_->peers().publishStreams(own_);
}

uint64_t RemoteRanks::announcedBy(int rank) const {
  return epoch_->peers().isSilent(rank) ? ~uint64_t{0} : epoch_->peers().streamsOf(rank).announced;
}

std::optional<WatchedRanks::Difference> RemoteRanks::findDifference(const Operations& under_way) {
  if (under_way.empty()) return std::nullopt;
  const Nanos time = now();
  if (time >= next_question_) {
    next_question_ = time + askAfter();
    epoch_->askForStreams(/*at_once=*/false);
  }
  for (int r = 0; r < group_.size(); ++r) {
    const OpSignature theirs = epoch_->peers().streamsOf(r).oldest;
    for (const StreamOperation& operation : under_way) {
      if (operation.what.sequence != theirs.sequence || operation.what == theirs) continue;
      if (differs_since_ == 0) differs_since_ = time;
      if (time - differs_since_ < turn()) return std::nullopt;
      return Difference{r, operation.what, theirs};
    }
  }
  return std::nullopt;
}

// The time of an operation counts from when its stream has reached it.
std::optional<WatchedRanks::Late> RemoteRanks::findLate(const Operations& under_way) {
  if (under_way.empty()) return std::nullopt;
  const StreamOperation& head = under_way.front();
  const Nanos time = now();
  if (head.begun_at == 0 || time - head.begun_at < head.timeout) return std::nullopt;
  if (asked_for_ != head.what.sequence) {
    asked_for_ = head.what.sequence;
    asked_at_ = time;
    epoch_->askForStreams(/*at_once=*/true);
  }
  if (time - asked_at_ < limits::kAnswer + turn() || differs_since_ != 0) return std::nullopt;
  // A lost rank is about to be reported as such.
  if (!std::ranges::all_of(epoch_->peers().states(), &PeerState::isHere)) return std::nullopt;
  return Late{head.what, head.timeout};
}

Finding RemoteRanks::blameForDelay(const OpSignature& what, int) const {
  std::vector<int> silent, behind;
  for (int r = 0; r < group_.size(); ++r) {
    if (r == group_.rank()) continue;
    const StreamProgress theirs = epoch_->peers().streamsOf(r);
    const bool reached = theirs.oldest.sequence > what.sequence ||  // also if there is none
                         (theirs.oldest.sequence == what.sequence && theirs.begun);
    if (epoch_->peers().isSilent(r))
      silent.push_back(r);
    else if (!reached)
      behind.push_back(r);
  }
  const auto their = [](const std::vector<int>& ranks) { return ranks.size() > 1; };
  if (!silent.empty())
    return {Failure::kTimeout, silent,
            epoch_->peers().whereabouts(silent) + " did not answer, so it is not known how far " +
                (their(silent) ? "they are" : "it is")};
  if (!behind.empty())
    return {Failure::kTimeout, behind,
            epoch_->peers().whereabouts(behind) + " came, but with other work in " +
                (their(behind) ? "their streams" : "its stream") + " before it"};
  return {Failure::kTimeout,
          {(group_.rank() + group_.size() - 1) % group_.size()},
          "all ranks came, and something between their GPUs stands still: a network, or a GPU; "
          "which cannot be told from here"};
}

Nanos RemoteRanks::lossPatience(bool) const {
  return turn() + (broken_since_ == 0 ? limits::kLastWorkFar : 0);
}

void RemoteRanks::probe() {
  hooks_.check_host();
  const std::string error = hooks_.transport_error();
  if (error.empty()) {
    broken_since_ = 0;
    return;
  }
  if (broken_since_ == 0) broken_since_ = now();
  if (now() - broken_since_ < limits::kHearsay + turn()) return;
  // A lost rank is being reported.
  if (std::ranges::any_of(epoch_->peers().states(), &PeerState::isLost)) return;
  // The text names this rank's neighbours.
  epoch_->arbiter->fail(Failure::kPeerLost, kNobody, error);
}

void RemoteRanks::abort(const std::string& why) {
  hooks_.poison();
  hooks_.end_waits(why);
}

}  // namespace ringreduce::cuda
