// The watcher's rounds.
#include "cuda/watcher.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>

#include "base/bytes.h"
#include "base/error.h"
#include "base/op_signature.h"
#include "base/text.h"
#include "cuda/ordering.h"

namespace ringreduce::cuda {
namespace {

// As messages call it.  Its `parts` are none: see communicator_state.h.
std::string textOf(OpSignature what) {
  what.parts = 0;
  return describe(what);
}

// Between two rounds: short while operations of microseconds come to their end, so that who waits
// for them does not wait for this thread; longer once they turn out to be long.
constexpr Nanos kShortRound = 50 * kMicrosecond, kLongRound = 2 * kMillisecond;
constexpr Nanos kIdleRound = 50 * kMillisecond;  // while awake with nothing entrusted
// Asking for dead processes costs a system call.
constexpr Nanos kRollCall = 10 * kMillisecond;
// What a rank that is gone had put into its stream may still be running for a moment.
constexpr Nanos kGrace = 200 * kMillisecond;

void set(uint32_t& word, uint32_t value) {
  std::atomic_ref(word).store(value, std::memory_order_release);
}
uint32_t get(uint32_t& word) {
  return std::atomic_ref(word).load(std::memory_order_acquire);
}

}  // namespace

Watcher::Watcher(Group& group, std::vector<HostState*> states)
    : group_(group), states_(std::move(states)), compared_(states_.size()) {
  watching_ = std::thread([this] { watch(); });
  collecting_ = std::thread([this] { collect(); });
  for (std::thread* thread : {&watching_, &collecting_})
    pthread_setname_np(thread->native_handle(), "ringreduce-gpu");
}

Watcher::~Watcher() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  watching_.join();
  collecting_.join();
}

uint64_t Watcher::announce(OpSignature what) {
  group_.checkHealth();
  const std::lock_guard lock(mutex_);
  const uint64_t number = announced_++;
  what.sequence = number;
  what.history = history_;
  for (uint64_t word :
       {what.count, static_cast<uint64_t>(what.kind), static_cast<uint64_t>(what.dtype),
        static_cast<uint64_t>(what.op), static_cast<uint64_t>(what.root), what.parts})
    history_ = mixed(history_, word);
  own().announcements[number % kRemembered].set(what);
  own().announced.publish(number + 1);
  return number;
}

void Watcher::entrust(uint64_t number, Nanos timeout, Finished finished, Label label) {
  {
    const std::lock_guard lock(mutex_);
    if (under_way_.empty()) head_since_ = now();
    under_way_.push_back({number, announcementOf(group_.rank(), number), timeout,
                          std::move(finished), std::move(label)});
  }
  changed_.notify_all();
}

void Watcher::stayAwake() {
  const std::lock_guard lock(mutex_);
  awake_ = true;
  changed_.notify_all();
}

void Watcher::check() {
  {
    const std::lock_guard lock(mutex_);
    if (!group_.failed()) look();
  }
  group_.checkHealth();
}

// False once the deadline has passed.
bool Watcher::pauseUntil(std::unique_lock<std::mutex>& lock, Nanos deadline) {
  const Nanos left = deadline - now();
  if (left <= 0) return false;
  changed_.wait_for(lock, std::chrono::nanoseconds(std::min(kLongRound, left)));
  return true;
}

bool Watcher::wait(Nanos longest) {
  const Nanos deadline = deadlineIn(longest);
  std::unique_lock lock(mutex_);
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

bool Watcher::settle(Nanos longest) {
  const Nanos deadline = deadlineIn(longest);
  std::unique_lock lock(mutex_);
  while (!under_way_.empty())
    if (!pauseUntil(lock, deadline)) return false;
  for (int r = 0; r < group_.size(); ++r) {
    HostState& theirs = *states_[static_cast<size_t>(r)];
    // In a group that has failed nobody comes to operations any more that it had not come to.
    const auto is_done = [&] {
      return theirs.finished.observe() >=
             (group_.failed() ? theirs.announced.observe() : announced_);
    };
    while (!is_done() && !group_.states()[static_cast<size_t>(r)].isLost())
      if (!pauseUntil(lock, deadline)) return false;
  }
  return true;
}

void Watcher::abort(const std::string& why) {
  group_.abort(why);
  const std::lock_guard lock(mutex_);
  letGo();
}

// ---- the threads

void Watcher::watch() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (under_way_.empty() && !awake_) {
      changed_.wait(lock, [&] { return stopping_ || awake_ || !under_way_.empty(); });
      continue;
    }
    look();
    const Nanos pause = under_way_.empty() ? kIdleRound : kLongRound;
    changed_.wait_for(lock, std::chrono::nanoseconds(pause), [&] { return stopping_; });
  }
}

// The other thread asks with nothing held: CUDA may not answer while another thread of the process
// is in a call that waits for the GPU, and the GPU for what letGo() ends.
void Watcher::collect() {
  std::unique_lock lock(mutex_);
  Nanos pause = kShortRound;
  while (!stopping_) {
    if (under_way_.empty()) {
      pause = kShortRound;
      changed_.wait(lock, [&] { return stopping_ || !under_way_.empty(); });
      continue;
    }
    Finished finished = under_way_.front().finished;
    lock.unlock();
    bool is_finished = false;
    std::string gpu_error;
    try {
      is_finished = finished();
    } catch (const Error& error) {
      gpu_error = error.what();
    }
    finished = nullptr;
    lock.lock();
    if (!gpu_error.empty()) {
      giveUp(gpu_error);
    } else if (is_finished) {
      // Nobody shall take for right what ranks disagreed about.
      if (!group_.failed()) look();
      own().finished.publish(under_way_.front().number + 1);
      under_way_.pop_front();
      head_since_ = now();
      missed_since_ = 0;
      pause = kShortRound;
      changed_.notify_all();
    } else {
      changed_.wait_for(lock, std::chrono::nanoseconds(pause), [&] { return stopping_; });
      pause = std::min(pause * 2, kLongRound);
    }
  }
}

// A GPU that has failed finishes nothing any more.
void Watcher::giveUp(const std::string& why) {
  under_way_.clear();
  changed_.notify_all();
  try {
    group_.fail(Failure::kAborted, group_.rank(), group_.who(group_.rank()) + " gave up: " + why);
  } catch (const Error&) {
    // As in look().
  }
  letGo();
}

// One round.  Errors are the group's: whoever calls it next raises them.
void Watcher::look() {
  try {
    if (!group_.failed()) {
      compare();
      blameKernel();
      blameAbsent();
      blameStream();
    }
  } catch (const Error&) {
    // The group has ended now, and says why to all who ask it.
  }
  if (group_.failed()) letGo();
}

// Ends every wait of this rank's kernels and streams.  First all ranks are told: a stream that goes
// on without what it waited for tells its peers that its part is done, and their outputs must be
// spoilt although their own watchers have not looked yet.
void Watcher::letGo() {
  for (HostState* state : states_) publishWord(state->abort, 1);
  for (HostState::Line& line : own().words) set(line.word, kReleased);
}

bool Watcher::hasAnnounced(int r, uint64_t number) const {
  return states_[static_cast<size_t>(r)]->announced.observe() > number;
}

OpSignature Watcher::announcementOf(int r, uint64_t number) const {
  return states_[static_cast<size_t>(r)]->announcements[number % kRemembered].get();
}

// " (DDP bucket 2)", or "" for what has no label or is no longer under way.
std::string Watcher::labelOf(uint64_t number) const {
  for (const Operation& operation : under_way_)
    if (operation.number == number && operation.label) return " (" + operation.label() + ")";
  return "";
}

// ---- disagreement

void Watcher::compare() {
  for (int r = 0; r < group_.size(); ++r) {
    if (r == group_.rank()) continue;
    uint64_t& n = compared_[static_cast<size_t>(r)];
    const uint64_t theirs = states_[static_cast<size_t>(r)]->announced.observe();
    const uint64_t both = std::min(theirs, announced_), ahead = std::max(theirs, announced_);
    // What is no longer there is vouched for by the next announcement's history.
    if (ahead > kRemembered - 1) n = std::max(n, std::min(both, ahead - (kRemembered - 1)));
    for (; n < both; ++n) {
      const OpSignature ours = announcementOf(group_.rank(), n), other = announcementOf(r, n);
      // It may have been written over while it was read.
      if (states_[static_cast<size_t>(r)]->announced.observe() >= n + kRemembered) break;
      if (ours == other) continue;
      const bool later = ours.history != other.history;
      const bool elsewhere = ours.kind == other.kind && ours.parts != other.parts;
      group_.fail(Failure::kMismatch, r,
                  std::string("ranks disagree on ") + (later ? "an operation before " : "") +
                      "GPU operation #" + std::to_string(n) + ": " + group_.who(group_.rank()) +
                      " calls " + textOf(ours) + labelOf(n) + ", " + group_.who(r) + " calls " +
                      textOf(other) +
                      (elsewhere ? ", by another algorithm or in other registered memory" : ""));
    }
  }
}

// ---- deadlines

// Who keeps an operation waiting, in words: those who have not come to it, or else who is waited
// for.
std::string Watcher::laggards(uint64_t number, int waited_for, int& culprit) const {
  std::vector<int> absent;
  uint64_t least = UINT64_MAX;
  for (int r = 0; r < group_.size(); ++r) {
    const uint64_t come = states_[static_cast<size_t>(r)]->announced.observe();
    if (r == group_.rank() || come > number || come > least) continue;
    if (come < least) absent.clear();
    least = come;
    absent.push_back(r);
  }
  if (!absent.empty()) {
    culprit = absent.front();
    return group_.whereabouts(absent) + " did not arrive";
  }
  // All have come, and whoever is waited for may itself wait for another: for one that is stopped.
  const std::vector<int> stopped = group_.stopped();
  culprit = stopped.empty() ? waited_for : stopped.front();
  if (!stopped.empty()) return group_.whereabouts(stopped) + " came, and then stood still";
  return group_.whereabouts({waited_for}) +
         " came, but did not do its part (or could not, for want of another's)";
}

void Watcher::timedOut(const OpSignature& what, Nanos timeout, int waited_for,
                       const std::string& where) {
  int culprit = waited_for;
  const std::string late = laggards(what.sequence, waited_for, culprit);
  group_.fail(Failure::kTimeout, culprit,
              late + ": GPU " + textOf(what) + " timed out after a timeout of " + seconds(timeout) +
                  where + labelOf(what.sequence));
}

// What this rank's kernels found.
void Watcher::blameKernel() {
  Trouble& trouble = own().trouble;
  if (observeWord(trouble.cause) != static_cast<uint64_t>(Cause::kTimeout)) return;
  OpSignature what = announcementOf(group_.rank(), trouble.operation);
  Nanos timeout = group_.timeout();
  for (const Operation& operation : under_way_)
    if (operation.number == trouble.operation) timeout = operation.timeout;
  timedOut(what, timeout, trouble.peer,
           " (channel " + std::to_string(trouble.channel) + ", step " +
               std::to_string(trouble.step) + ")");
}

// Ranks that are gone and are missed, and reports of waits that take long.
void Watcher::blameAbsent() {
  const Nanos time = now();
  if (time < next_roll_call_) return;
  next_roll_call_ = time + kRollCall;
  if (under_way_.empty() && !awake_) return;
  const std::vector<PeerState> states = group_.states();
  const auto is_absent = [](const PeerState& state) { return !state.isHere(); };
  const auto gone = std::find_if(states.begin(), states.end(), is_absent);
  if (gone == states.end()) {
    missed_since_ = 0;
  } else if (!under_way_.empty() || gone->isLost()) {
    const int r = static_cast<int>(gone - states.begin());
    const bool came = under_way_.empty() || hasAnnounced(r, under_way_.front().number);
    if (missed_since_ == 0) missed_since_ = time;
    if (!came || time - missed_since_ >= kGrace)
      group_.failLost(r, under_way_.empty() ? "while CUDA graphs of the group were in use"
                                            : (came ? "during GPU " : "before it came to GPU ") +
                                                  textOf(under_way_.front().what) +
                                                  labelOf(under_way_.front().number));
  }
  if (under_way_.empty()) return;
  const Nanos stall = group_.options().stall;
  if (time - head_since_ < stall || time < next_report_) return;
  next_report_ = time + std::max(time - head_since_, kSecond);
  int culprit = missingWord(under_way_.front().what);
  const std::string late = laggards(under_way_.front().number, culprit, culprit);
  log("rank " + group_.options().shown(group_.rank()) + " of group '" + group_.options().name +
      "' has had GPU " + textOf(under_way_.front().what) + " in its stream for " +
      seconds(time - head_since_) + labelOf(under_way_.front().number) + ": " + late);
}

// A peer whose word this rank's stream waits for; some peer if it waits for none.  Of a broadcast
// everybody waits for its root, and the root for those who read it to be done.
int Watcher::missingWord(const OpSignature& what) const {
  const bool is_root = what.root == group_.rank();
  if (what.root != kNoRoot && !is_root) return what.root;
  for (Word word : {Word::kReady, Word::kDone})
    for (int r = 0; r < group_.size() && !(is_root && word == Word::kReady); ++r)
      if (r != group_.rank() && get(own().words[wordIndex(word, r, group_.size())].word) == 0)
        return r;
  return (group_.rank() + 1) % group_.size();
}

// The direct schedule's deadline: its stream has begun, and has not come to an end since.
void Watcher::blameStream() {
  const uint64_t delivered = observeWord(own().delivered);
  const Nanos time = now();
  const bool busy = get(own().busy) != 0;
  if (!busy || !was_busy_ || delivered != delivered_) {
    was_busy_ = busy;
    delivered_ = delivered;
    delivered_since_ = time;
    return;
  }
  const Nanos timeout = under_way_.empty() ? group_.timeout() : under_way_.front().timeout;
  if (time - delivered_since_ < timeout) return;
  const OpSignature what =
      under_way_.empty() ? announcementOf(group_.rank(), announced_ - 1) : under_way_.front().what;
  timedOut(what, timeout, missingWord(what), "");
}

}  // namespace ringreduce::cuda
