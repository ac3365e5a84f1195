// Finds what is asked for in one epoch or in all of them.
#include "survival/epochs.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/limits.h"

namespace ringreduce {

Epochs::Epochs(int rank, int size, const GroupOptions& options, std::shared_ptr<Epoch> first,
               Recorder& messages)
    : rank_(rank),
      size_(size),
      options_(options),
      may_be_replaced_(first->mayBeReplaced()),
      messages_(messages),
      current_(std::move(first)) {
  record(*current_);
}

void Epochs::record(Epoch& epoch) {
  epoch.messenger->setObserver(
      std::make_unique<MessageRecorder>(messages_, epoch.ranks, epoch.rank, may_be_replaced_));
}

std::shared_ptr<Epoch> Epochs::current() const {
  const std::lock_guard lock(mutex_);
  return current_;
}

std::vector<std::shared_ptr<Epoch>> Epochs::all() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<Epoch>> all = candidates_;
  all.push_back(current_);
  return all;
}

void Epochs::run(const Operation& operation, Nanos timeout, bool in_users_thread,
                 Recording& recording) {
  if (current_->ranks.isWhole())
    return current_->run(operation, timeout, in_users_thread, &recording);
  const uint64_t sequence = recording.record.index;
  const Operation placed = toMembers(operation, current_->ranks,
                                     [&](int rank) { return lacks(operation, sequence, rank); });
  current_->run(placed, timeout, in_users_thread, &recording);
}

std::shared_ptr<Delivery> Epochs::post(Message message) {
  std::shared_ptr<Epoch> epoch;
  if (!may_be_replaced_) {
    epoch = current_;
  } else {
    const std::lock_guard lock(mutex_);
    epoch = current_;
    if (message.direction == Message::Direction::kSend) {
      // A later message must not be taken for one that was lost.
      if (sent_earlier_.contains(message.peer))
        throw Error(Failure::kPeerLost,
                    ownName() + " cannot send to rank " + options_.shown(message.peer) +
                        ": messages that it sent before the loss of a rank may have been lost too. "
                        "Send messages in a group that is made after the loss.");
      sent_to_.insert(message.peer);
    }
  }
  if (!epoch->ranks.isWhole() && message.peer >= 0 && message.peer < size_) {
    const auto position = epoch->ranks.positionOf(message.peer);
    if (!position)
      throw Error(Failure::kPeerLost,
                  howAbsent(message.peer) +
                      "; nothing can be sent to it or received from it. Group '" + options_.name +
                      "' goes on without it.",
                  facts(message.peer, false));
    message.peer = *position;
  }
  return epoch->messenger->post(std::move(message), epoch);
}

std::shared_ptr<Epoch> Epochs::epochOf(const Delivery& delivery) const {
  const auto owner = std::static_pointer_cast<Epoch>(delivery.owner.lock());
  return owner ? owner : current();
}

// ---- its failure

Failure Epochs::failure() const {
  const std::lock_guard lock(mutex_);
  if (ended_) return ended_->kind();
  const Failure failure = current_->arbiter->failure();
  if (failure != Failure::kPeerLost || !current_->mayBeReplaced()) return failure;
  return aborted_.empty() ? Failure::kNone : Failure::kAborted;
}

void Epochs::check() const {
  if (!may_be_replaced_) return current_->arbiter->check();  // it is never replaced
  if (failure() == Failure::kNone) return;
  checkAborted();
  const std::lock_guard lock(mutex_);
  if (ended_) throw Error(*ended_);
  current_->arbiter->check();
}

void Epochs::checkAborted() const {
  const std::lock_guard lock(mutex_);
  if (!ended_ && !aborted_.empty())
    throw Error(Failure::kAborted, ownName() + " aborted it: " + aborted_, facts(rank_, true));
}

void Epochs::abort(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (aborted_.empty()) aborted_ = why;
  current_->arbiter->abort(why);
  for (const auto& candidate : candidates_) candidate->arbiter->abort(why);
}

Error Epochs::end(const Error& error) {
  Facts last = error.facts();
  last.reporter = options_.shownAs(rank_);
  last.group = options_.name;
  last.is_final = true;
  std::string text = error.what();
  // As an epoch that may be replaced says of a loss, which this error may go on to explain.
  if (const auto at = text.find(kGroupGoesOn); at != std::string::npos) {
    text.erase(at, sizeof kGroupGoesOn - 1);
    text += kGroupHasFailed;
  }
  Error final(error.kind(), text, last);
  {
    const std::lock_guard lock(mutex_);
    ended_ = final;
  }
  for (const auto& one : all()) one->leave(nullptr, limits::kLeave);
  return final;
}

// ---- the next one

void Epochs::add(const std::shared_ptr<Epoch>& candidate) {
  const std::lock_guard lock(mutex_);
  candidates_.push_back(candidate);
}

void Epochs::enter(const std::shared_ptr<Epoch>& next) {
  record(*next);
  std::vector<std::shared_ptr<Epoch>> old;
  {
    const std::lock_guard lock(mutex_);
    old.swap(candidates_);
    std::erase(old, next);
    old.push_back(std::exchange(current_, next));
    sent_earlier_.merge(std::exchange(sent_to_, {}));
  }
  for (const auto& one : old) one->retire();
}

// A rank does not answer if it is to blame where it is still here.
Sight Epochs::look(int rank) const {
  if (rank == rank_) return Sight::kHere;
  auto sight = Sight::kEnded;
  for (const auto& one : all()) {
    const auto position = one->ranks.positionOf(rank);
    const Failure failure = one->arbiter->failure();
    // After another failure an epoch hears no news.
    if (!position || (failure != Failure::kNone && failure != Failure::kPeerLost)) continue;
    const PeerState state = one->arbiter->stateOf(*position);
    if (state.isHere() && failure == Failure::kPeerLost && one->arbiter->culprit() == *position)
      return Sight::kSilent;
    if (state.isHere())
      sight = Sight::kHere;
    else if (sight == Sight::kEnded && state.declared == Declared::kHere &&
             state.observed != Observed::kEnded)
      sight = Sight::kSilent;
  }
  return sight;
}

bool Epochs::isCut(int rank) const {
  return std::ranges::any_of(all(), [&](const auto& one) {
    const auto position = one->ranks.positionOf(rank);
    if (!position) return false;
    const Arbiter& arbiter = *one->arbiter;
    const bool is_blamed = arbiter.failure() == Failure::kPeerLost &&
                           arbiter.culprit() == *position && arbiter.reporter() == one->rank;
    const PeerState state = arbiter.stateOf(*position);
    return state.observed == Observed::kUnreachable || (state.isHere() && is_blamed);
  });
}

// Asks it, and waits briefly for an answer.
bool Epochs::isStopped(int rank) const {
  return std::ranges::none_of(all(), [&](const auto& one) {
    const auto position = one->ranks.positionOf(rank);
    return position && one->peers().answers(*position);
  });
}

// The lowest rank that goes on logs them.
void Epochs::noteLosses(const std::vector<int>& before, const std::vector<int>& left,
                        const std::string& during) {
  for (const int rank : before) {
    if (std::ranges::find(left, rank) != left.end()) continue;
    std::string how;
    for (const auto& one : all()) {
      const auto position = one->ranks.positionOf(rank);
      if (!position) continue;
      how = one->peers().howAbsent(*position);
      if (!one->arbiter->stateOf(*position).isHere()) break;  // it knows
    }
    {
      const std::lock_guard lock(mutex_);
      absent_[rank] = how;
    }
    if (left.front() == rank_)
      log(how + ", during " + during + " of group '" + options_.name + "'; " +
          std::to_string(left.size()) + " of " + std::to_string(size_) +
          (left.size() == 1 ? " ranks goes on" : " ranks go on"));
  }
}

// ---- texts

std::string Epochs::ownName() const {
  return "rank " + options_.shown(rank_) + " of group '" + options_.name + "'";
}

std::string Epochs::howAbsent(int rank) const {
  const std::lock_guard lock(mutex_);
  const auto known = absent_.find(rank);
  return known != absent_.end() ? known->second : "rank " + options_.shown(rank) + " is lost";
}

std::string Epochs::textOf(const Operation& operation, uint64_t sequence) const {
  OpSignature signature = signatureOf(operation, sequence);
  if (signature.root != kNoRoot) signature.root = options_.shownAs(signature.root);
  return describe(signature);
}

Error Epochs::lacks(const Operation& operation, uint64_t sequence, int rank) const {
  return Error(Failure::kPeerLost,
               howAbsent(rank) + "; rank " + options_.shown(rank_) + " needs its data in " +
                   textOf(operation, sequence) + ". Group '" + options_.name +
                   "' goes on without it.",
               facts(rank, false));
}

Facts Epochs::facts(int rank, bool is_final) const {
  return {.rank = options_.shownAs(rank),
          .reporter = options_.shownAs(rank_),
          .group = options_.name,
          .is_final = is_final};
}

}  // namespace ringreduce
