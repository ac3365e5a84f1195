// Repeats an operation in the next epoch until a plan says that it is done.
#include "survival/survivors.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/limits.h"
#include "bootstrap/attempt.h"
#include "survival/successor.h"

namespace ringreduce {
namespace {

// How often ranks that are all there try in vain.
constexpr int kMostFruitless = 4;

// Ends the making of an epoch as soon as one of its ranks is lost.
class WatchedAttempt final : public Attempt {
 public:
  explicit WatchedAttempt(std::function<void()> look) : Attempt(""), look_(std::move(look)) {}
  void poll(Nanos) override { look_(); }

 private:
  const std::function<void()> look_;
};

}  // namespace

Survivors::Survivors(Epochs& epochs, Executor& executor, const std::shared_ptr<Store>& store,
                     const std::atomic<Nanos>& patience)
    : epochs_(epochs),
      executor_(executor),
      patience_(patience),
      shared_(epochs.running().shared),
      recovery_(store, epochs) {}

void Survivors::run(const Operation& operation, Nanos timeout, bool in_users_thread,
                    Recording& recording) {
  const uint64_t sequence = recording.record.index;
  epochs_.check();
  Call call{operation, sequence, timeout, in_users_thread, recording, {.operation = sequence}};
  const std::optional<Overwritten> overwritten = repeatable(operation, epochs_.rank());
  try {
    if (operation.before) operation.before();
    if (overwritten && epochs_.running().network) keepInputs(*overwritten);
  } catch (const Error&) {
    throw;
  } catch (...) {
    epochs_.abort("interrupted in operation #" + std::to_string(sequence));
    throw;
  }
  for (;;) try {
      return attempt(call);
    } catch (const Error& error) {
      const Epoch& epoch = epochs_.running();
      if (!epoch.network || !epoch.arbiter->failed()) throw;
      if (epoch.arbiter->failure() != Failure::kPeerLost) {
        tell(error);  // some may have seen a loss first, and wait for this rank
        throw;
      }
      const std::vector<int> before = recovery_.members();
      if (recover(error, call)) return;
      if (!overwritten) throw lostIn(call, before);
      if (overwritten->bytes > 0) std::memcpy(overwritten->data, inputs_.get(), overwritten->bytes);
    }
}

void Survivors::keepInputs(const Overwritten& inputs) {
  if (inputs_bytes_ < inputs.bytes) {
    inputs_.reset();
    inputs_ = std::make_unique_for_overwrite<std::byte[]>(inputs.bytes);
    inputs_bytes_ = inputs.bytes;
  }
  if (inputs.bytes > 0) std::memcpy(inputs_.get(), inputs.data, inputs.bytes);
}

// Returns once all ranks of the epoch hold the result.
void Survivors::attempt(Call& call) {
  // A barrier has no result, and the second one would say the same again.
  const bool is_barrier = std::holds_alternative<Barrier>(call.operation.call) ||
                          std::holds_alternative<MonitoredBarrier>(call.operation.call);
  call.standing.holds = is_barrier;
  const Operation once{.call = call.operation.call, .timeout = call.operation.timeout};
  epochs_.run(once, call.timeout, call.in_users_thread, call.recording);
  // In shared memory the survivors finish the operation itself.
  if (is_barrier || !epochs_.running().network) return;
  call.standing.holds = true;
  call.standing.epoch = recovery_.epoch();
  epochs_.running().run({.call = Barrier{}}, call.timeout, call.in_users_thread, nullptr);
}

// Goes on without the lost ranks, after the error `loss`.  Returns whether the operation is done.
bool Survivors::recover(const Error& loss, Call& call) {
  const GroupOptions& options = epochs_.options();
  const int rank = epochs_.rank();
  const Nanos began = now(), patience = std::max(call.timeout, patience_.load());
  const auto poll = [&] {
    if (call.in_users_thread && options.interrupt) options.interrupt();
    if (!call.in_users_thread && options.interrupted && options.interrupted(began))
      throw Error(Failure::kAborted,
                  epochs_.ownName() + " was interrupted while it recovered from a loss",
                  epochs_.facts(rank, true));
    epochs_.checkAborted();
  };
  const std::string text = epochs_.textOf(call.operation, call.sequence);
  const auto nameLate = [&](const std::vector<int>& late) {
    const Epoch& epoch = epochs_.running();
    std::vector<int> positions;
    for (const int one : late) positions.push_back(epoch.ranks.positionOf(one).value());
    return epoch.peers().whereabouts(positions) + " did not come to " + text + " of group '" +
           options.name + "', which was to go on after a loss,";
  };
  const Recovery::Watch watch{.poll = poll, .nameLate = nameLate};
  Standing& standing = call.standing;
  try {
    for (int fruitless = 0;;) {
      const std::vector<int> before = recovery_.members();
      const Plan plan = recovery_.agree(standing, watch, patience);
      const bool is_done = plan.is_done || standing.operation < plan.operation;
      // From now on others may repeat it, or raise.
      if (!is_done) standing.holds = false;
      epochs_.noteLosses(before, plan.members, text);
      if (static_cast<int>(plan.members.size()) < shared_.min_ranks) {
        const Error error = tooFew(before);
        if (!standing.holds || !is_done) throw error;
        epochs_.end(error);  // of the next call
        return true;
      }
      if (makeNextEpoch(watch, call, patience, fruitless)) return standing.holds && is_done;
    }
  } catch (const StoreFailure& failure) {
    throw epochs_.end(
        {failure.kind(), std::string(loss.what()) + "; " + failure.what(), loss.facts()});
  } catch (const Error& error) {
    if (error.kind() == Failure::kAborted) tell(error);
    throw epochs_.end(error);
  } catch (...) {  // Ctrl-C
    const Error error(Failure::kAborted,
                      epochs_.ownName() + " was interrupted in a recovery from a loss",
                      epochs_.facts(rank, true));
    tell(error);
    epochs_.end(error);
    throw;
  }
}

// Of a call that cannot run again.
Error Survivors::lostIn(const Call& call, const std::vector<int>& before) const {
  const auto lost = std::ranges::mismatch(before, recovery_.members()).in1;
  if (lost != before.end()) return epochs_.lacks(call.operation, call.sequence, *lost);
  const GroupOptions& options = epochs_.options();
  return Error(Failure::kPeerLost, "rank " + options.shown(epochs_.rank()) +
                                       ": connections between ranks were lost in " +
                                       epochs_.textOf(call.operation, call.sequence) + ". Group '" +
                                       options.name + "' goes on.");
}

Error Survivors::tooFew(const std::vector<int>& before) const {
  const std::vector<int>& left = recovery_.members();
  std::string text;
  int first = epochs_.rank();
  for (const int rank : before) {
    if (std::ranges::find(left, rank) != left.end()) continue;
    if (text.empty()) first = rank;
    text += (text.empty() ? "" : "; ") + epochs_.howAbsent(rank);
  }
  return Error(Failure::kPeerLost,
               text + "; " + std::to_string(left.size()) +
                   (left.size() == 1 ? " rank is" : " ranks are") + " left of group '" +
                   epochs_.options().name + "', and min_ranks is " +
                   std::to_string(shared_.min_ranks),
               epochs_.facts(first, true));
}

// The first error matters more than one of the store.
void Survivors::tell(const Error& error) {
  try {
    recovery_.giveUp(error);
  } catch (const std::exception& failure) {
    log(epochs_.ownName() + " cannot tell the others why it ends: " + failure.what());
  }
}

// Makes the epoch of the plan's members; collective over them.  False if they have to meet again:
// one of them was lost, or they could not reach each other, which counts in `fruitless`.
bool Survivors::makeNextEpoch(const Recovery::Watch& watch, const Call& call, Nanos patience,
                              int& fruitless) {
  const std::vector<int>& members = recovery_.members();
  const auto firstLost = [&] {
    return std::ranges::find_if(members, [&](int r) { return epochs_.look(r) != Sight::kHere; });
  };
  GroupOptions made = epochs_.options();
  made.members = members;
  made.place = recovery_.meeting();
  made.shared = shared_;
  made.timeout = patience;
  if (!call.in_users_thread) made.interrupt = nullptr;
  made.attempt = std::make_shared<WatchedAttempt>([&] {
    watch.poll();
    if (const auto lost = firstLost(); lost != members.end())
      throw Error(Failure::kPeerLost,
                  "rank " + epochs_.options().shown(*lost) + " is lost too, in a recovery");
  });
  try {
    makeSuccessor(recovery_.store(), epochs_.rank(), epochs_.size(), made, executor_, nullptr,
                  [&](const std::shared_ptr<Epoch>& next, const Operation& barrier) {
                    epochs_.add(next);
                    watch.poll();
                    next->run(barrier, barrier.timeout, call.in_users_thread, nullptr);
                    epochs_.enter(next);
                  });
    return true;
  } catch (const Error& error) {
    if (error.kind() == Failure::kAborted) throw;
    // The news of another loss may be on its way.
    for (const Nanos until = deadlineIn(limits::kLossNews); firstLost() == members.end();) {
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

}  // namespace ringreduce
