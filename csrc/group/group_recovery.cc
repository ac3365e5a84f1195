// Operations of a group that goes on after losses between hosts: each is run until all ranks that
// go on hold its result (group/recovery.h).
#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "base/error.h"
#include "bootstrap/topology.h"
#include "group/group.h"
#include "group/network.h"

namespace ringreduce {
namespace {

// After an epoch could not be made: how long a rank looks for a lost one that explains it.
constexpr Nanos kLossNewsTime = 2 * kSecond;
// How often ranks that are all there try in vain.
constexpr int kMostFruitless = 4;

// Keys of one attempt to make an epoch.
class EpochStore final : public Store {
 public:
  EpochStore(Store& store, std::string prefix) : store_(store), prefix_(std::move(prefix)) {}
  void set(const std::string& key, const std::string& value) override {
    store_.set(prefix_ + key, value);
  }
  std::optional<std::string> get(const std::string& key) override {
    return store_.get(prefix_ + key);
  }
  void remove(const std::string& key) override { store_.remove(prefix_ + key); }
  std::string setOnce(const std::string& key, const std::string& value) override {
    return store_.setOnce(prefix_ + key, value);
  }

 private:
  Store& store_;
  const std::string prefix_;
};

// Ends the making of an epoch as soon as one of its ranks is lost.
class WatchedAttempt final : public Attempt {
 public:
  explicit WatchedAttempt(std::function<void()> check) : check_(std::move(check)) {}
  void claim() override {}
  void poll(Nanos) override { check_(); }

 private:
  const std::function<void()> check_;
};

int positionIn(const Epoch& epoch, int rank) {
  const std::vector<int>& members = epoch.options.members;
  if (members.empty()) return rank;
  const auto at = std::ranges::find(members, rank);
  return at == members.end() ? -1 : static_cast<int>(at - members.begin());
}

}  // namespace

void Group::executeWhole(const Operation& operation, Nanos timeout, bool in_users_thread) {
  checkHealth();
  Standing standing{.operation = sequence_ - 1};
  const std::optional<Overwritten> overwritten = repeatable(operation, rank_);
  try {
    if (operation.before) operation.before();
    if (overwritten && epoch_->network) keepInputs(*overwritten);
  } catch (const Error&) {
    throw;
  } catch (...) {
    abort("interrupted in operation #" + std::to_string(standing.operation));
    throw;
  }
  for (;;) try {
      return runWhole(operation, standing, timeout, in_users_thread);
    } catch (const Error& error) {
      const bool has_failed = epoch_->network && epoch_->arbiter->failed();
      if (!has_failed) throw;
      if (epoch_->arbiter->failure() != Failure::kPeerLost) {
        tell(error);  // some may have seen a loss first, and wait for this rank
        throw;
      }
      const std::vector<int> before = recovery_->members();
      if (recover(error, standing, operation, std::max(timeout, timeout_.load()), in_users_thread))
        return;
      if (!overwritten) {
        const std::vector<int>& left = recovery_->members();
        const auto lost = std::ranges::mismatch(before, left).in1;
        if (lost != before.end()) throw lacks(operation, *lost);
        throw Error(Failure::kPeerLost,
                    "rank " + options_.shown(rank_) + ": connections between ranks were lost in " +
                        textOf(operation) + ". Group '" + options_.name + "' goes on.");
      }
      if (overwritten->bytes > 0) std::memcpy(overwritten->data, inputs_.get(), overwritten->bytes);
    }
}

void Group::keepInputs(const Overwritten& inputs) {
  if (inputs_bytes_ < inputs.bytes) {
    inputs_.reset();
    inputs_ = std::make_unique_for_overwrite<std::byte[]>(inputs.bytes);
    inputs_bytes_ = inputs.bytes;
  }
  if (inputs.bytes > 0) std::memcpy(inputs_.get(), inputs.data, inputs.bytes);
}

// Returns once all ranks of the epoch hold the result.
void Group::runWhole(const Operation& operation, Standing& standing, Nanos timeout,
                     bool in_users_thread) {
  // A barrier has no result, and the second one would say the same again.
  const bool is_barrier = std::holds_alternative<Barrier>(operation.call) ||
                          std::holds_alternative<MonitoredBarrier>(operation.call);
  standing.holds = is_barrier;
  Operation placed = inEpoch(operation);
  placed.before = nullptr;
  epoch_->run(placed, timeout, in_users_thread);
  // In shared memory the survivors finish the operation itself.
  if (is_barrier || !epoch_->network) return;
  standing.holds = true;
  standing.epoch = recovery_->epoch();
  epoch_->run({.call = Barrier{}}, timeout, in_users_thread);
}

// Goes on without the lost ranks, after the error `loss`.  Returns whether the operation is done.
bool Group::recover(const Error& loss, Standing& standing, const Operation& operation,
                    Nanos timeout, bool in_users_thread) {
  const Nanos began = now();
  const auto poll = [&] {
    if (in_users_thread && options_.interrupt) options_.interrupt();
    if (!in_users_thread && options_.interrupted && options_.interrupted(began))
      throw Error(Failure::kAborted, ownName() + " was interrupted while it recovered from a loss",
                  facts(rank_, true));
    const std::lock_guard lock(epoch_mutex_);
    if (!aborted_.empty())
      throw Error(Failure::kAborted, ownName() + " aborted it: " + aborted_, facts(rank_, true));
  };
  const std::string text = textOf(operation);
  const auto nameLate = [&](const std::vector<int>& late) {
    std::vector<int> positions;
    for (const int rank : late) positions.push_back(positionIn(*epoch_, rank));
    return epoch_->arbiter->peers().whereabouts(positions) + " did not come to " + text +
           " of group '" + options_.name + "', which was to go on after a loss,";
  };
  const Recovery::Watch watch{.look = [this](int rank) { return look(rank); },
                              .isCut = [this](int rank) { return isCut(rank); },
                              .isStopped = [this](int rank) { return isStopped(rank); },
                              .poll = poll,
                              .nameLate = nameLate};
  try {
    for (int fruitless = 0;;) {
      const std::vector<int> before = recovery_->members();
      const Plan plan = recovery_->agree(standing, watch, timeout);
      const bool is_done = plan.is_done || standing.operation < plan.operation;
      // From now on others may repeat it, or raise.
      if (!is_done) standing.holds = false;
      noteLosses(before, text);
      if (static_cast<int>(plan.members.size()) < shared_.min_ranks) {
        const Error error = tooFew(before);
        if (!standing.holds || !is_done) throw error;
        end(error);  // of the next call
        return true;
      }
      if (makeNextEpoch(watch, timeout, in_users_thread, fruitless))
        return standing.holds && is_done;
    }
  } catch (const StoreFailure& failure) {
    throw end({failure.kind(), std::string(loss.what()) + "; " + failure.what(), loss.facts()});
  } catch (const Error& error) {
    if (error.kind() == Failure::kAborted) tell(error);
    throw end(error);
  } catch (...) {  // Ctrl-C
    const Error error(Failure::kAborted, ownName() + " was interrupted in a recovery from a loss",
                      facts(rank_, true));
    tell(error);
    end(error);
    throw;
  }
}

Error Group::tooFew(const std::vector<int>& before) const {
  const std::vector<int>& left = recovery_->members();
  std::string text;
  int first = rank_;
  for (const int rank : before) {
    if (std::ranges::find(left, rank) != left.end()) continue;
    if (text.empty()) first = rank;
    text += (text.empty() ? "" : "; ") + howAbsent(rank);
  }
  return Error(Failure::kPeerLost,
               text + "; " + std::to_string(left.size()) +
                   (left.size() == 1 ? " rank is" : " ranks are") + " left of group '" +
                   options_.name + "', and min_ranks is " + std::to_string(shared_.min_ranks),
               facts(first, true));
}

// The first error matters more than one of the store.
void Group::tell(const Error& error) {
  try {
    recovery_->giveUp(error);
  } catch (const std::exception& failure) {
    log(ownName() + " cannot tell the others why it ends: " + failure.what());
  }
}

std::string Group::ownName() const {
  return "rank " + options_.shown(rank_) + " of group '" + options_.name + "'";
}

// Makes the epoch of the plan's members; collective over them.  False if they have to meet again:
// one of them was lost, or they could not reach each other, which counts in `fruitless`.
bool Group::makeNextEpoch(const Recovery::Watch& watch, Nanos timeout, bool in_users_thread,
                          int& fruitless) {
  const std::vector<int>& members = recovery_->members();
  const auto firstLost = [&] {
    return std::ranges::find_if(members,
                                [&](int r) { return watch.look(r) != Recovery::Sight::kHere; });
  };
  GroupOptions made = options_.ofMembers(members, size_);
  made.shared = shared_;
  made.timeout = timeout;
  if (!in_users_thread) made.interrupt = nullptr;
  made.attempt = std::make_shared<WatchedAttempt>([&] {
    watch.poll();
    if (const auto lost = firstLost(); lost != members.end())
      throw Error(Failure::kPeerLost,
                  "rank " + options_.shown(*lost) + " is lost too, in a recovery");
  });
  const auto self = std::ranges::find(members, rank_);
  EpochStore store(recovery_->store(), recovery_->meeting());
  try {
    const auto next = Epoch::create(store, static_cast<int>(self - members.begin()),
                                    static_cast<int>(members.size()), made, *executor_, nullptr);
    {
      const std::lock_guard lock(epoch_mutex_);
      tried_.push_back(next);
    }
    watch.poll();
    next->run({.call = Barrier{}}, timeout, in_users_thread);
    enter(next);
    return true;
  } catch (const Error& error) {
    if (error.kind() == Failure::kAborted) throw;
    // The news of another loss may be on its way.
    for (const Nanos until = deadlineIn(kLossNewsTime); firstLost() == members.end();) {
      watch.poll();
      if (now() >= until) {
        if (++fruitless == kMostFruitless) throw;
        break;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return false;
  }
}

// All members have made it, so none of them needs this rank in an older one.
void Group::enter(const std::shared_ptr<Epoch>& next) {
  std::vector<std::shared_ptr<Epoch>> old;
  {
    const std::lock_guard lock(epoch_mutex_);
    old.swap(tried_);
    std::erase(old, next);
    old.push_back(std::exchange(epoch_, next));
    sent_earlier_.merge(std::exchange(sent_to_, {}));
  }
  for (const auto& one : old) one->retire();
}

std::vector<std::shared_ptr<Epoch>> Group::epochs() const {
  const std::lock_guard lock(epoch_mutex_);
  std::vector<std::shared_ptr<Epoch>> all = tried_;
  all.push_back(epoch_);
  return all;
}

// A rank that is here in any epoch is here: it leaves the older ones as it goes on, and a newer one
// if it cannot make it.  But it does not answer if it is to blame where it is still here.
Recovery::Sight Group::look(int rank) const {
  using Sight = Recovery::Sight;
  if (rank == rank_) return Sight::kHere;
  auto sight = Sight::kEnded;
  for (const auto& one : epochs()) {
    const int position = positionIn(*one, rank);
    const Failure failure = one->arbiter->failure();
    // After another failure an epoch hears no news.
    if (position < 0 || (failure != Failure::kNone && failure != Failure::kPeerLost)) continue;
    const PeerState state = one->arbiter->stateOf(position);
    if (state.isHere() && failure == Failure::kPeerLost && one->arbiter->culprit() == position)
      return Sight::kSilent;
    if (state.isHere())
      sight = Sight::kHere;
    else if (sight == Sight::kEnded && state.declared == Declared::kHere &&
             state.observed != Observed::kEnded)
      sight = Sight::kSilent;
  }
  return sight;
}

// As this rank has found itself.
bool Group::isCut(int rank) const {
  return std::ranges::any_of(epochs(), [&](const auto& one) {
    const int position = positionIn(*one, rank);
    if (position < 0) return false;
    const Arbiter& arbiter = *one->arbiter;
    const bool is_blamed = arbiter.failure() == Failure::kPeerLost &&
                           arbiter.culprit() == position && arbiter.reporter() == one->rank;
    const PeerState state = arbiter.stateOf(position);
    return state.observed == Observed::kUnreachable || (state.isHere() && is_blamed);
  });
}

// Asks it, and waits briefly for an answer.
bool Group::isStopped(int rank) const {
  return std::ranges::none_of(epochs(), [&](const auto& one) {
    const int position = positionIn(*one, rank);
    return position >= 0 && one->arbiter->peers().stoppedOf({position}).empty() &&
           one->arbiter->peers().answers(position);
  });
}

// One rank logs them.
void Group::noteLosses(const std::vector<int>& before, const std::string& operation) {
  const std::vector<int>& left = recovery_->members();
  for (const int rank : before) {
    if (std::ranges::find(left, rank) != left.end()) continue;
    std::string who;
    bool is_known = false;
    for (const auto& one : epochs()) {
      const int position = positionIn(*one, rank);
      if (position < 0 || is_known) continue;
      who = one->arbiter->peers().howAbsent(position);
      is_known = !one->arbiter->stateOf(position).isHere();
    }
    {
      const std::lock_guard lock(epoch_mutex_);
      absent_[rank] = who;
    }
    if (left.front() == rank_)
      log(who + ", during " + operation + " of group '" + options_.name + "'; " +
          std::to_string(left.size()) + " of " + std::to_string(size_) +
          (left.size() == 1 ? " ranks goes on" : " ranks go on"));
  }
}

// The other ranks go on without this one.  Returns the error of this call and of all later ones.
Error Group::end(const Error& error) {
  Facts last = error.facts();
  last.reporter = options_.shownAs(rank_);
  last.group = options_.name;
  last.is_final = true;
  std::string text = error.what();
  if (text.ends_with(kGroupGoesOn))  // as an epoch that recovers says
    text.replace(text.rfind(kGroupGoesOn), std::string::npos, kGroupHasFailed);
  Error final(error.kind(), text, last);
  {
    const std::lock_guard lock(epoch_mutex_);
    ended_ = final;
  }
  for (const auto& one : epochs()) one->leave(nullptr, kSecond);
  return final;
}

}  // namespace ringreduce
