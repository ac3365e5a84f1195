// The two threads: which operations are done, and which are late, differ or lack a rank.
#include "cuda/communicator/watchdog.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <system_error>

#include "base/error.h"
#include "base/op_signature.h"
#include "base/text.h"

namespace ringreduce::cuda {
namespace {

// The signature's `parts` hold a hash of the algorithm (host_communicator_state.h), not parts.
std::string textOf(OpSignature what) {
  what.parts = 0;
  return describe(what);
}

// Between two rounds.  Short at first if a user's thread waits, so that it sees the end of a short
// operation soon.
constexpr Nanos kShortRound = 50 * kMicrosecond, kLongRound = 2 * kMillisecond;
constexpr Nanos kIdleRound = 50 * kMillisecond;  // while awake with nothing under way
// Probes and the search for ended processes cost system calls.
constexpr Nanos kRollCall = 10 * kMillisecond;
// A record waits so long for when the other ranks came, which they see a little later themselves.
constexpr Nanos kTold = 100 * kMillisecond;

}  // namespace

Watchdog::Watchdog(Group& group, std::unique_ptr<WatchedRanks> ranks)
    : group_(group), ranks_(std::move(ranks)) {
  ++group_.gpu_communicators;
  try {
    watching_ = std::thread([this] { watch(); });
    collecting_ = std::thread([this] { collect(); });
  } catch (const std::system_error& error) {
    stop();
    throw Error(Failure::kSetup, noThread("that watches the GPU", error));
  }
  for (std::thread* thread : {&watching_, &collecting_})
    pthread_setname_np(thread->native_handle(), "ringreduce-gpu");
}

Watchdog::~Watchdog() {
  stop();
}

void Watchdog::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread* thread : {&watching_, &collecting_})
    if (thread->joinable()) thread->join();
  --group_.gpu_communicators;
}

// ---- calls of users' threads

uint64_t Watchdog::announce(OpSignature what) {
  group_.checkHealth();
  const std::lock_guard lock(mutex_);
  what.sequence = announced_++;
  what.history = history_;
  history_ = what.historyAfter();
  latest_ = what;
  ranks_->announce(what);
  return what.sequence;
}

void Watchdog::track(Nanos timeout, Reached finished, Label label, Reached begun) {
  bool was_idle = false;
  {
    const std::lock_guard lock(mutex_);
    was_idle = under_way_.empty();
    if (was_idle) head_ = headClock();
    if (const uint32_t step = training_step.load(std::memory_order_relaxed); step != step_) {
      step_ = step;
      bucket_ = 0;
    }
    under_way_.push_back({.what = latest_,
                          .timeout = timeout,
                          .begun = std::move(begun),
                          .finished = std::move(finished),
                          .label = std::move(label),
                          .posted = monotonicNow(),
                          .step = step_,
                          .bucket = bucket_});
    if (latest_.kind == Kind::kAllReduce) ++bucket_;
    ranks_->advance(finished_, under_way_);
  }
  if (was_idle) changed_.notify_all();
}

void Watchdog::stayAwake() {
  const std::lock_guard lock(mutex_);
  awake_ = true;
  changed_.notify_all();
}

void Watchdog::check() {
  {
    const std::lock_guard lock(mutex_);
    if (!group_.failed()) look();
  }
  group_.checkHealth();
}

// Returns false once the deadline has passed.
bool Watchdog::pauseUntil(Lock& lock, Nanos deadline) {
  const Nanos time = now(), left = deadline - time;
  if (left <= 0) return false;
  if (!isAwaited()) changed_.notify_all();
  awaited_at_ = time;
  changed_.wait_for(lock, std::chrono::nanoseconds(std::min(kLongRound, left)));
  return true;
}

// A thread that waits notes it in every round.
bool Watchdog::isAwaited() const {
  return now() - awaited_at_ < 2 * kLongRound;
}

bool Watchdog::wait(Nanos longest) {
  const Nanos deadline = deadlineIn(longest);
  Lock lock(mutex_);
  while (!under_way_.empty()) {
    if (!pauseUntil(lock, deadline)) return false;
    lock.unlock();
    group_.interrupt("while it waited for GPU operations");
    lock.lock();
  }
  lock.unlock();
  group_.checkHealth();
  return true;
}

bool Watchdog::settle(Nanos longest) {
  const Nanos deadline = deadlineIn(longest);
  Lock lock(mutex_);
  while (!under_way_.empty() || hasToAbort()) {
    // In every round: the group may fail at any time, and the watching thread sleep.
    changed_.notify_all();
    if (!pauseUntil(lock, deadline)) return false;
  }
  for (int r = 0; r < group_.size(); ++r) {
    // In a failed group, no rank gets to operations that it had not announced.
    const auto is_done = [&] {
      return ranks_->isDone(r, group_.failed() ? ranks_->announcedBy(r) : announced_);
    };
    while (!is_done() && !epoch_->peers().hasExited(r))
      if (!pauseUntil(lock, deadline)) return false;
  }
  return true;
}

void Watchdog::abort(const std::string& why) {
  group_.abort(why);
  const std::lock_guard lock(mutex_);
  release();
}

// ---- the threads

void Watchdog::watch() {
  Lock lock(mutex_);
  while (!stopping_) {
    if (hasToAbort()) {
      aborted_ = true;
      release();
      lock.unlock();
      try {
        group_.checkHealth();
      } catch (const Error& error) {
        ranks_->abort(error.what());
      }
      lock.lock();
    }
    if (under_way_.empty() && !awake_) {
      changed_.wait(lock,
                    [&] { return stopping_ || awake_ || !under_way_.empty() || hasToAbort(); });
      continue;
    }
    if (now() >= next_probe_ && !group_.failed()) {
      next_probe_ = now() + kRollCall;
      lock.unlock();
      try {
        ranks_->probe();
      } catch (const Error&) {
        // As in look().
      }
      lock.lock();
    }
    look();
    const Nanos pause = under_way_.empty() ? kIdleRound : kLongRound;
    changed_.wait_for(lock, std::chrono::nanoseconds(pause), [&] { return stopping_; });
  }
}

// It asks CUDA without the lock: CUDA may not answer while another thread of the process is in a
// call that waits for the GPU, and the GPU may wait until release() ends that wait.
void Watchdog::collect() {
  Lock lock(mutex_);
  Nanos pause = kShortRound;
  while (!stopping_) {
    closeEnded();
    if (under_way_.empty()) {
      const auto hasWork = [&] { return stopping_ || !under_way_.empty(); };
      if (ended_.empty())
        changed_.wait(lock, hasWork);
      else
        changed_.wait_for(lock, std::chrono::nanoseconds(kLongRound), hasWork);
      continue;
    }
    Reached begun = under_way_.front().begun_at ? nullptr : under_way_.front().begun;
    Reached finished = under_way_.front().finished;
    const bool tells_begin = under_way_.front().begun != nullptr;
    lock.unlock();
    bool is_begun = false, is_finished = false;
    std::string gpu_error;
    try {
      is_begun = !begun || begun();
      is_finished = is_begun && finished();
    } catch (const Error& error) {
      gpu_error = error.what();
    }
    begun = finished = nullptr;
    lock.lock();
    if (!gpu_error.empty()) {
      giveUp(gpu_error);
      continue;
    }
    StreamOperation& head = under_way_.front();
    const Nanos seen = monotonicNow();
    if (!is_begun) looked_at_ = seen;
    if (is_begun && head.begun_at == 0) {
      head.begun_at = now();
      if (tells_begin) {
        head.arrived = seen;
        head.error = seen - std::max({head.posted, ended_at_, looked_at_});
      }
      ranks_->arrive(head.what.sequence, {tells_begin ? head.arrived : kNever, head.error});
      if (!is_finished) ranks_->advance(finished_, under_way_);
    }
    if (is_finished) {
      // No result of an operation in which ranks differ may be taken for right.
      if (!group_.failed()) look();
      finished_ = head.what.sequence + 1;
      end(std::move(head), group_.failed());
      under_way_.pop_front();
      head_ = headClock();
      lost_since_ = 0;
      ranks_->advance(finished_, under_way_);
      if (!isAwaited()) continue;
      pause = kShortRound;
      changed_.notify_all();
    } else {
      const bool was_awaited = isAwaited();
      const auto isAwaitedNow = [&] { return !was_awaited && isAwaited(); };
      changed_.wait_for(lock, std::chrono::nanoseconds(pause),
                        [&] { return stopping_ || isAwaitedNow(); });
      pause = isAwaitedNow() ? kShortRound : std::min(pause * 2, kLongRound);
    }
  }
}

// After a failure of the GPU, which then finishes nothing more, and touches no memory.
void Watchdog::giveUp(const std::string& why) {
  for (StreamOperation& operation : under_way_) end(std::move(operation), true);
  under_way_.clear();
  finished_ = announced_;
  ranks_->advance(finished_, under_way_);
  changed_.notify_all();
  try {
    epoch_->arbiter->fail(Failure::kAborted, group_.rank(),
                          epoch_->peers().who(group_.rank()) + " gave up: " + why);
  } catch (const Error&) {
    // As in look().
  }
  closeEnded();
  release();
}

// ---- records

std::vector<OpRecord> Watchdog::records(uint64_t since) {
  read_at_ = monotonicNow();
  const std::lock_guard lock(mutex_);
  std::vector<OpRecord> found = records_.since(since);
  uint64_t index = records_.next();
  for (const auto* operations : {&ended_, &under_way_})
    for (const StreamOperation& operation : *operations) {
      found.push_back(recordOf(operation));
      found.back().index = index++;
    }
  return found;
}

void Watchdog::addTo(Totals& totals) {
  read_at_ = monotonicNow();
  records_.addTo(totals);
}

OpRecord Watchdog::recordOf(const StreamOperation& operation) const {
  const OpSignature& what = operation.what;
  const bool of_parts = what.kind == Kind::kAllGather || what.kind == Kind::kReduceScatter;
  const auto parts = static_cast<uint64_t>(of_parts ? group_.size() : 1);
  OpRecord record{.sequence = what.sequence,
                  .bytes = what.count * sizeOf(what.dtype) * parts,
                  .posted = operation.posted,
                  .arrived = operation.arrived,
                  .step = operation.step,
                  .bucket = operation.bucket,
                  .known = 1,
                  .root = what.root,
                  .kind = what.kind,
                  .dtype = what.dtype,
                  .op = what.op};
  record.state = operation.arrived ? OpRecord::State::kRuns : OpRecord::State::kQueued;
  record.first = record.median = record.arrived;
  record.clock_error = operation.error;
  return record;
}

// The rest with the lock held, and so by one thread at a time.  Without an event of its begin, the
// operation has begun at some time since the one before it ended.
void Watchdog::end(StreamOperation operation, bool failed) {
  operation.begun = operation.finished = nullptr;  // they keep events
  operation.done = monotonicNow();
  operation.failed = failed;
  if (operation.arrived == 0) {
    operation.arrived = std::max(operation.posted, ended_at_);
    operation.error = operation.done - operation.arrived;
  }
  ended_at_ = operation.done;
  ended_.push_back(std::move(operation));
}

// Whether it is known when all ranks came, as far as it will be.
bool Watchdog::isTold(const StreamOperation& operation) const {
  if (group_.failed() || monotonicNow() - operation.done > kTold) return true;
  const uint64_t number = operation.what.sequence;
  if (ranks_->arrivalOf(group_.rank(), number).at == kNever) return true;
  for (int r = 0; r < group_.size(); ++r)
    if (ranks_->arrivalOf(r, number).at == 0) return false;
  return true;
}

void Watchdog::closeEnded() {
  for (; !ended_.empty() && isTold(ended_.front()); ended_.pop_front()) close(ended_.front());
}

void Watchdog::close(const StreamOperation& operation) {
  OpRecord record = recordOf(operation);
  record.index = records_.next();
  record.done = operation.done;
  record.state = operation.failed ? OpRecord::State::kFailed : OpRecord::State::kDone;
  std::vector<Nanos> arrived(static_cast<size_t>(group_.size()));
  const uint64_t number = operation.what.sequence;
  const bool compares = ranks_->arrivalOf(group_.rank(), number).at == operation.arrived;
  for (int r = 0; compares && r < group_.size(); ++r) {
    const StreamArrival one = ranks_->arrivalOf(r, number);
    if (one.at == 0 || one.at == kNever) continue;
    arrived[static_cast<size_t>(r)] = one.at;
    record.clock_error = std::max(record.clock_error, one.error);
  }
  arrived[static_cast<size_t>(group_.rank())] = operation.arrived;
  records_.setArrivals(record, arrived, all_, [](int) { return Inherited{}; });
  records_.end(record);
  records_.count(record, kNever);  // no thread of the program waits in it
}

// One round.  The next call raises the group's error.
void Watchdog::look() {
  try {
    if (!group_.failed()) {
      compare();
      checkDeadlines();
      checkPresence();
    }
  } catch (const Error&) {
    // The group has failed now.
  }
  if (group_.failed()) release();
}

// With the lock held.
void Watchdog::release() {
  ranks_->release();
  changed_.notify_all();
}

// " (DDP bucket 2)"; "" without a label or if the operation has finished.
std::string Watchdog::labelOf(uint64_t number) const {
  for (const StreamOperation& operation : under_way_)
    if (operation.what.sequence == number && operation.label) return " (" + operation.label() + ")";
  return "";
}

// ---- checks

void Watchdog::compare() {
  const auto found = ranks_->findDifference(under_way_);
  if (!found) return;
  const auto& [rank, ours, theirs] = *found;
  const bool earlier = ours.history != theirs.history;
  const bool elsewhere = ours.kind == theirs.kind && ours.parts != theirs.parts;
  epoch_->arbiter->fail(
      Failure::kMismatch, rank,
      std::string("ranks disagree on ") + (earlier ? "an operation before " : "") +
          "GPU operation #" + std::to_string(ours.sequence) + ": " +
          epoch_->peers().who(group_.rank()) + " calls " + textOf(ours) + labelOf(ours.sequence) +
          ", " + epoch_->peers().who(rank) + " calls " + textOf(theirs) +
          (elsewhere ? ", by another algorithm or of tensors of other sizes" : ""));
}

void Watchdog::checkDeadlines() {
  const auto late = ranks_->findLate(under_way_);
  if (!late) return;
  Finding found = blame(late->what, late->waited_for);
  found.text += ": GPU " + textOf(late->what) + " timed out after a timeout of " +
                seconds(late->timeout) + late->where + labelOf(late->what.sequence);
  // The first communicators of all ranks belong together, then the second ones.
  if (const int gpus = group_.gpu_communicators; gpus > 1)
    found.text += "; " + epoch_->peers().who(group_.rank()) + " calls the group on " +
                  std::to_string(gpus) +
                  " GPUs: have all ranks used theirs for the first time in the same order?";
  epoch_->arbiter->fail(found);
}

Finding Watchdog::blame(const OpSignature& what, int waited_for) const {
  return lateInStream(
      epoch_->peers(), what, [&](int r) { return ranks_->announcedBy(r); },
      [&] { return ranks_->blameForDelay(what, waited_for); });
}

// Fails the group if a rank is lost that an operation needs, and logs waits that take long.
void Watchdog::checkPresence() {
  const Nanos time = now();
  if (time < next_roll_call_) return;
  next_roll_call_ = time + kRollCall;
  if (under_way_.empty() && !awake_) return;
  const std::vector<PeerState> states = epoch_->peers().states();
  const auto gone = std::ranges::find_if_not(states, &PeerState::isHere);
  if (gone == states.end()) {
    lost_since_ = 0;
  } else if (!under_way_.empty() || gone->isLost()) {
    const int r = static_cast<int>(gone - states.begin());
    const bool idle = under_way_.empty();
    const bool came = idle || ranks_->mayHaveCome(r, under_way_.front().what.sequence);
    if (lost_since_ == 0) lost_since_ = time;
    if (time - lost_since_ >= ranks_->lossPatience(came)) {
      if (idle) epoch_->arbiter->failLost(r, "while CUDA graphs of the group were in use");
      const OpSignature& what = under_way_.front().what;
      epoch_->arbiter->failLost(r, (came ? "during GPU " : "before it came to GPU ") +
                                       textOf(what) + labelOf(what.sequence));
    }
  }
  if (!under_way_.empty()) reportStall(time);
}

void Watchdog::reportStall(Nanos time) {
  if (!head_.reportIsDue(time)) return;
  const OpSignature& what = under_way_.front().what;
  log("rank " + group_.options().shown(group_.rank()) + " of group '" + group_.options().name +
      "' has had GPU " + textOf(what) + " in its stream for " + seconds(head_.waited(time)) +
      labelOf(what.sequence) + ": " + blame(what, -1).text);
}

}  // namespace ringreduce::cuda
