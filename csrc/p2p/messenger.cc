// Posting and waiting, the thread that moves messages while no other waits, and errors that end a
// message.
#include "p2p/messenger.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/op_signature.h"
#include "base/text.h"
#include "base/wait_clock.h"

namespace ringreduce {

// ---- rings in shared memory

std::vector<Engine::Channels> messageRings(const HostMemory& m, int rank) {
  const Layout at(m.options, static_cast<int>(m.members.size()));
  // The memory of rank `of` for messages from rank `peer`.
  const auto box = [&](int of, int peer) -> Box& {
    return reinterpret_cast<Box*>(memoryOf(m, of) + at.boxes)[peer];
  };
  const auto ring = [&](int of, int peer) {
    return memoryOf(m, of) + at.rings + static_cast<size_t>(peer) * kRingBytes;
  };
  std::vector<Engine::Channels> channels;
  for (int r = 0; r < static_cast<int>(m.members.size()); ++r)
    channels.push_back({.out = {ring(r, rank), box(r, rank).filled, box(rank, r).emptied},
                        .in = {ring(rank, r), box(rank, r).filled, box(r, rank).emptied},
                        .consumed = &box(r, rank).consumed,
                        .acknowledged = &box(rank, r).consumed});
  return channels;
}

// ---- posting and waiting

namespace {

// The rank that a transfer is with, or kAnySource if that is not known yet.
int peerOf(const Transfer& transfer) {
  return transfer.source != kAnySource ? transfer.source : transfer.message.peer;
}

static_assert(kAnySource < 0);  // health/judge.h

constexpr Nanos kCheckPeriod = kLongestSleep / 2;  // of peers, deadlines and Ctrl-C
// How often the thread looks whether it is needed, and after how many looks in vain it sleeps until
// it is notified: a notification costs more than a small message.
constexpr auto kDoze = std::chrono::milliseconds(1);
constexpr int kDozes = 50;

}  // namespace

Messenger::Messenger(int rank, std::vector<Engine::Channels> channels, Arbiter& arbiter,
                     Executor& executor, const GroupOptions& options, Patience patience)
    : rank_(rank),
      size_(static_cast<int>(channels.size())),
      arbiter_(arbiter),
      executor_(executor),
      options_(options),
      patience_(patience),
      engine_(std::move(channels)) {}

Messenger::~Messenger() {
  if (thread_.joinable()) stop(nullptr, kNever);
}

std::shared_ptr<Delivery> Messenger::post(Message message, std::weak_ptr<void> owner) {
  const bool from_any =
      message.direction == Message::Direction::kReceive && message.peer == kAnySource;
  if (!from_any && (message.peer < 0 || message.peer >= size_))
    throw Error(Failure::kArgument,
                std::string("ringreduce ") +
                    (message.direction == Message::Direction::kSend ? "send: to" : "recv: from") +
                    " rank " + std::to_string(message.peer) + " in a group of " +
                    std::to_string(size_));
  arbiter_.check();
  auto delivery = std::make_shared<Delivery>(std::move(message), std::move(owner), options_);
  delivery->called = monotonicNow();
  {
    const std::lock_guard lock(mutex_);
    if (closed_) throw Error(Failure::kAborted, "the group has been destroyed");
    ++posts_;
    if (observer_) {
      const ClockOffset clock = arbiter_.clock();
      delivery->ahead = clock.ahead;
      if (clock.isKnown()) delivery->posted = delivery->called - clock.ahead;
      delivery->why = observer_->onPost(delivery->message.peer, delivery->called);
    }
    engine_.post(delivery);
  }
  pass(delivery->called);
  if (!delivery->isDone()) {
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable()) startThread();
    notifyThread();
  }
  return delivery;
}

void Messenger::keep(Delivery& delivery, std::shared_ptr<void> memory) {
  const std::lock_guard lock(mutex_);
  if (!delivery.over) delivery.message.memory = std::move(memory);
}

// ---- moving on

// Moves messages of all ranks once.  Completions run without the lock: tensors and callbacks may
// take other locks.
bool Messenger::pass(Nanos at) {
  std::vector<Engine::Handle> over;
  std::vector<int> touched;
  bool moved = false, others_wait = false;
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return false;  // the channels may be closed
    moved = engine_.progress(over, touched);
    if (!over.empty()) tellEnds(over, at, /*failed=*/false);
    others_wait = driven_ && driver_ != std::this_thread::get_id();
  }
  for (int r : touched)
    if (r != rank_ || others_wait) arbiter_.peers().wakeMessenger(r);
  if (over.empty()) return moved;
  finish(over, nullptr);
  // The driver may sleep and wait for a message that this thread has just finished.
  if (others_wait) wakeSleeper(arbiter_.peers().messengerWord());
  notifyUsers();
  return true;
}

// With the lock held.
void Messenger::tellEnds(const std::vector<Engine::Handle>& over, Nanos at, bool failed) {
  if (!observer_) return;
  if (at == 0) at = monotonicNow();
  for (const Engine::Handle& handle : over)
    observer_->onEnd(static_cast<const Delivery&>(*handle), at, failed || handle->mismatch);
}

void Messenger::forEachPending(const std::function<void(const Delivery&)>& look) {
  const std::lock_guard lock(mutex_);
  for (const Engine::Handle& handle : engine_.pending())
    look(static_cast<const Delivery&>(*handle));
}

void Messenger::finish(const std::vector<Engine::Handle>& over, std::exception_ptr error) {
  for (const Engine::Handle& handle : over) {
    auto& delivery = static_cast<Delivery&>(*handle);
    std::exception_ptr why = error;
    if (!why) {
      try {
        if (delivery.mismatch) checkMismatch(delivery);
        if (delivery.message.after) delivery.message.after();
      } catch (...) {
        why = std::current_exception();
      }
    }
    delivery.message.after = nullptr;
    delivery.message.memory = nullptr;
    if (OperationHandle::Completion completion = delivery.finish(why))
      executor_.callLater(std::move(completion), why);
  }
}

void Messenger::fail(std::vector<Engine::Handle> some, const std::exception_ptr& error) {
  {
    const std::lock_guard lock(mutex_);
    // Another thread may have finished one since it was found pending.
    std::erase_if(some, [](const Engine::Handle& handle) { return handle->over; });
    for (const Engine::Handle& handle : some) engine_.cancel(handle);
    tellEnds(some, 0, /*failed=*/true);
  }
  finish(some, error);
  notifyUsers();
}

void Messenger::failAll(const std::exception_ptr& error) {
  std::vector<Engine::Handle> all;
  {
    const std::lock_guard lock(mutex_);
    all.assign(engine_.pending().begin(), engine_.pending().end());
    for (const Engine::Handle& handle : all) engine_.cancel(handle);
    tellEnds(all, 0, /*failed=*/true);
  }
  finish(all, error);
  notifyUsers();
}

// Takes the lock, so that no thread is between its check of a message and its wait.
void Messenger::notifyUsers() {
  {
    const std::lock_guard lock(mutex_);
  }
  changed_.notify_all();
}

// ---- waiting

// Makes this thread the driver.  A signal handler may drive inside its own thread's wait.
struct Messenger::Driving {
  explicit Driving(Messenger& m) : messenger(m), nested(m.driven_), before(m.driver_) {
    m.driven_ = true;
    m.driver_ = std::this_thread::get_id();
  }
  ~Driving() {
    {
      const std::lock_guard lock(messenger.mutex_);
      messenger.driven_ = nested;
      messenger.driver_ = before;
      messenger.notifyThread();
    }
    messenger.changed_.notify_all();
  }
  Messenger& messenger;
  const bool nested;
  const std::thread::id before;
};

// The times of a wait: the next look, the deadline, the next report in the log.
class Messenger::Clock {
 public:
  Clock(const Messenger& m, Nanos timeout)
      : messenger_(m), wait_(timeout, m.options_.stall, now(started_at_)) {}

  // Whether it is time to check Ctrl-C, peers and the deadline.  The functions below refer to the
  // time of the latest check.
  bool isDue() {
    time_ = now();
    if (time_ < next_) return false;
    next_ = time_ + kCheckPeriod;
    return true;
  }
  bool isLate() const { return wait_.isOver(time_); }
  Nanos timeout() const { return wait_.timeout(); }
  Nanos startedAt() const { return started_at_; }  // in CLOCK_MONOTONIC

  // Logs that the wait goes on, if a report is due.
  template <class What>
  void report(const What& what) {
    if (!wait_.reportIsDue(time_)) return;
    const GroupOptions& options = messenger_.options_;
    log("rank " + options.shown(messenger_.rank_) + " of group '" + options.name + "' has waited " +
        seconds(wait_.waited(time_)) + " to " + what());
  }

 private:
  const Messenger& messenger_;
  Nanos started_at_ = 0;
  WaitClock wait_;
  Nanos next_ = 0, time_ = 0;
};

// Throws the exception of Ctrl-C.  All other errors end the delivery.
void Messenger::checkWait(const Delivery& delivery, Clock& clock) {
  if (!clock.isDue()) return;
  const Message& m = delivery.message;
  arbiter_.peers().setAwaitedMessage(
      {.exists = true, .is_send = m.direction == Message::Direction::kSend, .peer = m.peer});
  try {
    if (options_.interrupt) options_.interrupt();
  } catch (...) {
    // The caller may free the buffer, and a message that is half sent cannot be taken back.
    arbiter_.abort("interrupted while it waited to " + describe(delivery));
    failAll(std::current_exception());
    throw;
  }
  try {
    arbiter_.check();
    checkPeers();
    if (clock.isLate() && !delivery.isDone()) timedOut(delivery, clock.timeout());
  } catch (const Error&) {
    return failAll(std::current_exception());
  }
  if (!delivery.isDone())
    clock.report([&] { return describe(delivery) + ": " + missing(delivery); });
}

bool Messenger::await(Delivery& delivery, Nanos longest, Nanos timeout) {
  if (delivery.isDone()) return true;
  delivery.refuseInChild();
  const Nanos limit = deadlineIn(longest);
  Clock clock(*this, timeout);

  struct User {
    User(Messenger& m, Delivery& delivery, Nanos at) : messenger(m) {
      const std::lock_guard lock(m.mutex_);
      if (delivery.awaited == 0) delivery.awaited = at;
      ++m.users_;
      thread_drives = m.driven_ && m.driver_ == m.thread_.get_id();
    }
    ~User() {
      messenger.arbiter_.peers().setAwaitedMessage({});
      const std::lock_guard lock(messenger.mutex_);
      --messenger.users_;
      messenger.notifyThread();
    }
    Messenger& messenger;
    bool thread_drives;
  } const user(*this, delivery, clock.startedAt());
  if (user.thread_drives) wakeSleeper(arbiter_.peers().messengerWord());  // it makes way

  while (!delivery.isDone()) {
    std::unique_lock lock(mutex_);
    if (driven_ && driver_ != std::this_thread::get_id()) {
      const Nanos longest_wait = std::min(kCheckPeriod, std::max<Nanos>(0, limit - now()));
      if (!delivery.isDone()) changed_.wait_for(lock, std::chrono::nanoseconds(longest_wait));
      lock.unlock();
      checkWait(delivery, clock);
      if (now() >= limit) return delivery.isDone();
      continue;
    }
    const Driving driving(*this);
    lock.unlock();
    const Nanos began = now();
    Nanos moved_at = began;
    while (!delivery.isDone()) {
      const bool moved = pass();
      const Nanos time = now();
      if (moved) moved_at = time;
      const Nanos idle = time - moved_at;
      const bool tired = idle >= patience_.spin + patience_.yield || arbiter_.failed();
      // Also while messages of others keep moving.
      if (tired || time - began >= kCheckPeriod) checkWait(delivery, clock);
      if (time >= limit) return delivery.isDone();
      if (moved) continue;
      if (tired)
        sleep(&delivery);
      else if (idle < patience_.spin)
        pause();
      else
        sched_yield();
    }
  }
  return true;
}

// Until a peer wakes this rank, or for a few milliseconds.
void Messenger::sleep(const Delivery* waited_for) {
  uint32_t& word = arbiter_.peers().messengerWord();
  std::atomic_ref(word).store(1, std::memory_order_seq_cst);
  const bool moved = pass();
  const bool done = waited_for ? waited_for->isDone() : wantedByUsers();
  if (!moved && !done && !arbiter_.failed()) sleepOn(word, 1, kLongestSleep);
  std::atomic_ref(word).store(0, std::memory_order_relaxed);
}

bool Messenger::wantedByUsers() {
  const std::lock_guard lock(mutex_);
  return users_ > 0;
}

// ---- the thread

bool Messenger::wantsThread() const {
  return !engine_.pending().empty() && !driven_ && users_ == 0;
}

// With the lock held, after each change that may make wantsThread true.
void Messenger::notifyThread() {
  if (thread_asleep_ && wantsThread()) for_thread_.notify_one();
}

void Messenger::startThread() {
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    throw Error(Failure::kArgument,
                std::string("ringreduce cannot start a thread for messages: ") + error.what());
  }
}

void Messenger::run() {
  pthread_setname_np(pthread_self(), "ringreduce-p2p");
  int dozes = 0;
  uint64_t seen = 0;
  Nanos next_look = 0;
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (!wantsThread()) {
      if (seen != posts_) dozes = 0;
      seen = posts_;
      if (dozes++ < kDozes) {
        for_thread_.wait_for(lock, kDoze);
      } else {
        thread_asleep_ = true;
        for_thread_.wait(lock, [&] { return stopping_ || wantsThread(); });
        thread_asleep_ = false;
        dozes = 0;
      }
      continue;
    }
    dozes = 0;
    {
      const Driving driving(*this);
      lock.unlock();
      if (!pass()) sleep(nullptr);
      if (now() >= next_look) {
        next_look = now() + kCheckPeriod;
        try {
          arbiter_.check();
          checkPeers();
          checkExpected();
        } catch (const Error&) {
          failAll(std::current_exception());
        }
      }
    }
    lock.lock();
  }
}

bool Messenger::isIdle() {
  const std::lock_guard lock(mutex_);
  return engine_.pending().empty();
}

void Messenger::stop(void (*poll)(), Nanos timeout) {
  std::vector<Engine::Handle> given_up;  // receives, and messages to this rank itself
  bool first = false;                    // no earlier call was interrupted or is complete
  {
    const std::lock_guard lock(mutex_);
    first = !std::exchange(closed_, true);
    for (const Engine::Handle& handle : engine_.pending())
      if (handle->message.direction == Message::Direction::kReceive ||
          handle->message.peer == rank_)
        given_up.push_back(handle);
  }
  const auto left = std::make_exception_ptr(
      Error(Failure::kAborted, "rank " + options_.shown(rank_) + " left group '" + options_.name +
                                   "' before a message that it was to receive had come"));
  fail(std::move(given_up), left);
  if (first) arbiter_.peers().depart(Declared::kLeaving);
  const auto sending = [&] {
    const std::lock_guard lock(mutex_);
    return !engine_.pending().empty();
  };
  Clock clock(*this, timeout);
  while (sending()) {
    if (clock.isDue()) {
      try {
        if (poll) poll();
        arbiter_.check();
        checkPeers();
        if (clock.isLate())
          throw Error(Failure::kTimeout, "rank " + options_.shown(rank_) + " left group '" +
                                             options_.name + "' " + seconds(timeout) +
                                             " after it was told to: " + stillSending());
      } catch (const Error& error) {
        if (error.kind() == Failure::kTimeout) log(error.what());
        failAll(std::current_exception());
      } catch (...) {
        failAll(std::current_exception());
        throw;
      }
      clock.report([&] { return "leave: " + stillSending(); });
    }
    if (!pass()) sleep(nullptr);
  }
  std::thread thread;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    for_thread_.notify_all();
    // The thread cannot join itself: a later call from another thread does.
    if (thread_.get_id() != std::this_thread::get_id()) thread.swap(thread_);
  }
  wakeSleeper(arbiter_.peers().messengerWord());
  if (thread.joinable()) thread.join();
}

// ---- errors of messages: a mismatch, a lost rank, a deadline

void Messenger::checkMismatch(const Transfer& transfer) {
  const Message& m = transfer.message;
  arbiter_.fail(Failure::kMismatch, transfer.source,
                "ranks disagree on a message: " + arbiter_.peers().who(transfer.source) + " sent " +
                    std::to_string(transfer.sent_count) + " elements of " +
                    name(transfer.sent_dtype) + " with tag " + std::to_string(m.tag) +
                    ", where rank " + options_.shown(rank_) + " receives " +
                    std::to_string(m.count) + " of " + name(m.dtype));
}

// Ends messages to and from ranks that are gone.
void Messenger::checkPeers() {
  std::vector<PeerState> peers = arbiter_.peers().states();
  peers[static_cast<size_t>(rank_)] = {};  // this rank may be leaving itself
  if (std::ranges::all_of(peers, &PeerState::isHere)) return;
  // All that a gone rank has sent is in memory by now: take it first.
  const auto hasNews = [&] {
    const std::lock_guard lock(mutex_);
    for (int r = 0; r < size_; ++r)
      if (peers[static_cast<size_t>(r)].isGone() && engine_.hasNews(r)) return true;
    return false;
  };
  do pass();
  while (hasNews());
  std::vector<Engine::Handle> hopeless;
  {
    const std::lock_guard lock(mutex_);
    for (const Engine::Handle& handle : engine_.pending())
      if (isHopeless(*handle, peers)) hopeless.push_back(handle);
  }
  for (const Engine::Handle& handle : hopeless) {
    const int peer = peerOf(*handle);
    const std::vector<int> awaited =
        peer == kAnySource ? otherRanks(rank_, size_) : std::vector<int>{peer};
    const Error error = arbiter_.errorOfGone(awaited, describe(*handle));
    fail({handle}, std::make_exception_ptr(error));
  }
}

// Whether no message can complete this transfer any more.
bool Messenger::isHopeless(const Transfer& transfer, const std::vector<PeerState>& peers) const {
  const int peer = peerOf(transfer);
  if (peer == kAnySource) {
    const auto is_gone = [&](int r) { return peers[static_cast<size_t>(r)].isGone(); };
    return size_ > 1 && std::ranges::all_of(otherRanks(rank_, size_), is_gone);
  }
  const PeerState& state = peers[static_cast<size_t>(peer)];
  if (state.isGone()) return true;
  // A rank that leaves takes only the messages that it has matched already.
  const bool leaving = state.declared != Declared::kHere;
  return leaving && transfer.message.direction == Message::Direction::kSend && !transfer.matched;
}

void Messenger::expect(Delivery& delivery, Nanos timeout) {
  const std::lock_guard lock(mutex_);
  if (delivery.expected_since != 0) return;
  delivery.expected_since = now();
  if (delivery.awaited == 0) delivery.awaited = monotonicNow();
  delivery.timeout = timeout;
}

// The deadline and Ctrl-C of a wait inside torch (Future.wait).
void Messenger::checkExpected() {
  const Nanos time = now();
  Engine::Handle late;
  bool interrupted = false;
  {
    const std::lock_guard lock(mutex_);
    for (const Engine::Handle& handle : engine_.pending()) {
      const auto& delivery = static_cast<const Delivery&>(*handle);
      if (delivery.expected_since == 0) continue;
      interrupted = options_.interrupted && options_.interrupted(delivery.expected_since);
      if (!interrupted && time - delivery.expected_since < delivery.timeout) continue;
      late = handle;
      break;
    }
  }
  if (!late) return;
  const auto& delivery = static_cast<const Delivery&>(*late);
  if (interrupted) {
    arbiter_.abort("interrupted while it waited to " + describe(delivery));
    arbiter_.check();
  }
  timedOut(delivery, delivery.timeout);
}

void Messenger::timedOut(const Delivery& delivery, Nanos timeout) {
  // This rank may have been the late one, and all it waits for have arrived.
  arbiter_.refreshProgress();
  pass();
  if (delivery.isDone()) return;
  const auto [peer, missing] = missingOf(delivery);
  Finding found = lateMessage(arbiter_.peers(), peer, missing);
  found.text += ": to " + describe(delivery) + " timed out after a timeout of " + seconds(timeout);
  arbiter_.fail(found);
}

// ---- texts

// The first message that is still to be sent, and the rank that does not receive it.
std::string Messenger::stillSending() {
  Engine::Handle first;
  {
    const std::lock_guard lock(mutex_);
    if (!engine_.pending().empty()) first = *engine_.pending().begin();
  }
  return first ? missing(*first) + ", to which it is to " + describe(*first) : "nothing is left";
}

std::string Messenger::describe(const Transfer& transfer) const {
  const Message& m = transfer.message;
  const bool send = m.direction == Message::Direction::kSend;
  return std::string(send ? "send " : "receive ") + std::to_string(m.count) +
         (m.count == 1 ? " element" : " elements") + " of " + name(m.dtype) +
         (send ? " to " : " from ") +
         (m.peer == kAnySource ? "any rank" : "rank " + options_.shown(m.peer)) + " with tag " +
         std::to_string(m.tag) + " (message #" + std::to_string(transfer.number) + ")";
}

// The rank that a transfer waits for, and what that has not done.
std::pair<int, std::string> Messenger::missingOf(const Transfer& transfer) {
  const Message& m = transfer.message;
  const std::lock_guard lock(mutex_);
  if (transfer.matched)
    return {peerOf(transfer), " is not done with it (" + std::to_string(transfer.moved) + " of " +
                                  std::to_string(m.bytes()) + " bytes)"};
  return {m.peer,
          m.direction == Message::Direction::kSend ? " did not receive it" : " did not send it"};
}

std::string Messenger::missing(const Transfer& transfer) {
  const auto [peer, what] = missingOf(transfer);
  return undone(arbiter_.peers(), peer, what).text;
}

}  // namespace ringreduce
