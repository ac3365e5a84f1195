// How the arbiter polls, decides why the group has failed, finds the rank to blame, and takes news
// of ranks of other hosts.
#include "health/arbiter.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/op_signature.h"
#include "base/text.h"
#include "bootstrap/process.h"
#include "transport/shm/wait.h"

namespace ringreduce {
namespace {

// After a connection ended: how long a wait gives the control ring to say why.
constexpr Nanos kNewsTime = 600 * kMillisecond;
// The same for a connection for messages, which ends when its rank leaves or fails: that news has
// to go round the ring.
constexpr Nanos kExplainedTime = 2 * kSecond;
// Between hosts: how long a rank that found a mismatch collects the calls of the others, and the
// time between its questions, since a rank that has just arrived has more to tell.
constexpr Nanos kRemoteCensus = kSecond, kCensusPeriod = 50 * kMillisecond;
// How long a rank reads bytes that have arrived already, before it trusts its view of the others.
constexpr Nanos kReadTime = 20 * kMillisecond;
// How long a killed process may take to end, and how much time an operation has after a loss.
constexpr Nanos kTimeToGoOn = 5 * kSecond;
// How long a rank may take to answer at the deadline of another, until it is left out.
constexpr Nanos kAnswerTime = 2 * kSecond;

constexpr uint64_t pack(const GroupFailure& failure) {
  return static_cast<uint64_t>(failure.kind) << 48 |
         static_cast<uint64_t>(failure.culprit & kLargestRank) << 24 |
         static_cast<uint64_t>(failure.reporter);
}

void sleepMillisecond() {
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace

std::vector<Seat> seatsOf(const Membership& membership) {
  std::vector<Seat> seats;
  for (const Member& member : membership.members)
    seats.push_back({.page = reinterpret_cast<RankPage*>(member.segment->data()),
                     .process = member.process,
                     .name = "pid " + std::to_string(member.pid) + " on host " + member.host,
                     .pid = 0});
  return seats;
}

Arbiter::Arbiter(int rank, std::vector<Seat> seats, const GroupOptions& options,
                 PeerChannel* channel, int min_ranks)
    : rank_(rank),
      size_(static_cast<int>(seats.size())),
      options_(options),
      channel_(channel),
      min_ranks_(min_ranks),
      peers_(seats.size()) {
  for (size_t r = 0; r < seats.size(); ++r) {
    processes_.push_back(seats[r].process);
    peers_[r].seat = std::move(seats[r]);
  }
  if (min_ranks_ == 0 || channel_ || size_ == 1) return;
  try {
    pulse_ = std::make_unique<Pulse>(page(rank_));
  } catch (const Error&) {
    depart(Declared::kGone);  // the others have made the group
    throw;
  }
}

void Arbiter::begin(const OpSignature& operation, Nanos timeout, bool in_users_thread) {
  current_ = operation;
  current_.history = history_;
  history_ = current_.historyAfter();
  inline_ = in_users_thread;
  in_monitored_barrier_ = operation.kind == Kind::kMonitoredBarrier;
  check();
  started_ = now();
  timeout_ = timeout;
  deadline_ = deadlineIn(timeout, started_);
  has_more_time_ = false;
  next_report_ = deadlineIn(options_.stall, started_);
  // Before the log names ranks that are late.
  next_question_ = std::min(started_ + kSecond, next_report_ - kCensus);
  waits_for_.store(-1, std::memory_order_relaxed);
  if (channel_) return recordSignature(rank_, operation.sequence, current_);
  RankPage& own = page(rank_);
  own.announcements[operation.sequence % kAnnouncements] = current_;
  own.announced.publish(operation.sequence + 1);
}

void Arbiter::end() {
  in_monitored_barrier_ = false;
  waits_for_.store(-1, std::memory_order_relaxed);
  if (isLeftOut()) throwFailure();
}

void Arbiter::depart(Declared how) {
  std::atomic_ref(page(rank_).departed)
      .store(static_cast<uint32_t>(how), std::memory_order_release);
  if (channel_) return channel_->depart(how);
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    wakeIfWaiting(page(r), rank_);
    wakeSleeper(page(r).messenger_wake_word);
  }
}

void Arbiter::wakeMessenger(int rank) {
  uint32_t& word = page(rank).messenger_wake_word;
  if (channel_ && rank != rank_)
    channel_->wakePeer(rank);
  else if (channel_ || std::atomic_ref(word).load(std::memory_order_seq_cst))
    wakeSleeper(word);
}

// ---- whether this process runs

Pulse::Pulse(RankPage& page) : page_(page) {
  // Signals are for the threads of the user's program.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = new std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw Error(Failure::kSetup, noThread("that on_loss='continue' needs", error));
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Pulse::~Pulse() {
  if (generation_ != forkGeneration()) return;
  stopping_ = true;
  wakeSleeper(page_.pulse_wake_word);
  thread_->join();
  delete thread_;
}

void Pulse::run() {
  pthread_setname_np(pthread_self(), "ringreduce-live");
  const std::atomic_ref asleep(page_.pulse_wake_word);
  const std::atomic_ref pulses(page_.pulses);
  for (;;) {
    asleep.store(1, std::memory_order_seq_cst);
    pulses.fetch_add(1, std::memory_order_seq_cst);
    if (stopping_) return;
    sleepOn(page_.pulse_wake_word, 1, 3600 * kSecond);
  }
}

// ---- the failure

// The first cause wins.
void Arbiter::decide(const GroupFailure& failure) {
  if (isLeftOut()) return wakeAll();  // the group is the others'
  if (!failed()) {
    // One thread of this rank at a time; the others find the word set.
    const std::lock_guard lock(mutex_);
    if (!failed()) {
      RankPage& reporters = page(failure.reporter);
      std::strncpy(reporters.record, failure.text.c_str(), sizeof reporters.record - 1);
      uint64_t none = 0;
      failureWord().compare_exchange_strong(none, pack(failure), std::memory_order_seq_cst);
      if (channel_ && failure.reporter == rank_) channel_->broadcastError(failure);
    }
  }
  wakeAll();
}

void Arbiter::wakeAll() {
  for (int r = 0; r < size_; ++r) {
    wake(page(r));
    wakeSleeper(page(r).messenger_wake_word);
  }
}

void Arbiter::check() const {
  if (failed() || isLeftOut()) throwFailure();
}

void Arbiter::fail(Failure kind, int culprit, const std::string& text) {
  decide({.kind = kind, .culprit = culprit, .reporter = rank_, .text = text});
  throwFailure();
}

void Arbiter::failLost(int rank, const std::string& when, const std::string& how) {
  const PeerState state = stateOf(rank);
  const std::string why = state.isLost() ? howLost(rank) : state.isHere() ? how : "";
  fail(Failure::kPeerLost, rank,
       who(rank) + (why.empty() ? " has left the group" : " is lost: " + why) + " " + when);
}

// Of the ranks that a receive from any rank waits for: a stopped one, or the first of all.
int Arbiter::firstOfAny() const {
  const std::vector<int> others = otherRanks(rank_, size_);
  if (others.empty()) return kNobody;
  const std::vector<int> stopped = stoppedOf(others);
  return stopped.empty() ? others.front() : stopped.front();
}

void Arbiter::failLate(int peer, const std::string& missing, const std::string& doing,
                       Nanos timeout) {
  // The other rank may itself wait for a third one in a collective.
  const int culprit = peer < 0 ? firstOfAny() : heldUpBy(peer);
  std::string text = missing;
  if (peer >= 0 && culprit != peer)
    text = whereabouts({culprit}) + " holds up the others; late too: " + missing;
  else if (peer >= 0 && waitsFor(peer) == rank_)
    text += ", and waits for this rank itself; do the order of calls and the tags match?";
  fail(Failure::kTimeout, culprit,
       text + ": to " + doing + " timed out after a timeout of " + seconds(timeout));
}

Error Arbiter::errorOfGone(const std::vector<int>& ranks, const std::string& doing) {
  const std::string waited = "; rank " + options_.shown(rank_) + " waited to " + doing;
  for (int r : ranks)
    if (const PeerState state = stateOf(r); state.isLost() && state.declared == Declared::kHere) {
      const std::string text = who(r) + " is lost: " + howLost(r) + waited;
      if (min_ranks_ > 0) return Error(Failure::kPeerLost, text, factsOf(r, rank_, false));
      fail(Failure::kPeerLost, r, text);
    }
  return Error(Failure::kPeerLost,
               (ranks.size() == 1 ? who(ranks[0]) + " has" : options_.rankList(ranks) + " have") +
                   " left group '" + options_.name + "'" + waited,
               factsOf(ranks[0], rank_, min_ranks_ == 0));
}

void Arbiter::abort(const std::string& why) {
  decide({.kind = Failure::kAborted,
          .culprit = rank_,
          .reporter = rank_,
          .text = who(rank_) + " aborted group '" + options_.name + "': " + why});
}

void Arbiter::throwFailure() const {
  if (isLeftOut())
    throw Error(Failure::kPeerLost,
                who(rank_) + " was left out of group '" + options_.name + "': " + kDidNotAnswer +
                    " (was it stopped, or its container paused?), and the other ranks go on "
                    "without it. Start it again.",
                factsOf(rank_, rank_, true));
  const uint64_t word = failureWord().load(std::memory_order_acquire);
  const auto kind = static_cast<Failure>(word >> 48);
  const auto reporter = static_cast<int>(word & 0xffffff);
  std::string text = page(reporter).record;
  if (kind != Failure::kMismatch && kind != Failure::kAborted)
    text += ", in group '" + options_.name + "'";
  text += "; noticed by rank " + options_.shown(reporter);
  if (reporter != rank_) text += ", learned by rank " + options_.shown(rank_);
  if (in_monitored_barrier_ && rank_ != 0)
    text += ". Rank " + options_.shown(rank_) +
            " successfully reached monitoredBarrier, but received errors while waiting for "
            "send/recv from rank " +
            options_.shown(0);
  const bool goes_on = channel_ && min_ranks_ > 0 && kind == Failure::kPeerLost;
  text += goes_on ? kGroupGoesOn : kGroupHasFailed;
  throw Error(kind, text, factsOf(culprit(), reporter, !goes_on));
}

Facts Arbiter::factsOf(int culprit, int reporter, bool is_final) const {
  return {.rank = culprit == kNobody ? kNobody : options_.shownAs(culprit),
          .reporter = options_.shownAs(reporter),
          .group = options_.name,
          .is_final = is_final};
}

// ---- the state of ranks

// An ended process has passed full barriers of the kernel, so its stores are visible.  That loads
// after this function see them, on AArch64 too, follows from `observed`: its store comes after
// poll(), and known() loads it before the process's flags are read.
void Arbiter::readProcesses() const {
  // First those that another rank has left out: it has done so to one that has ended, too.
  std::vector<bool> left_out(static_cast<size_t>(size_));
  for (int r = 0; r < size_ && pulse_; ++r)
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

// The order matters: a rank says that it left before its process ends.
PeerState Arbiter::known(int rank) const {
  PeerState state;
  state.observed = peer(rank).observed;
  state.drained = peer(rank).drained;
  state.declared =
      static_cast<Declared>(std::atomic_ref(page(rank).departed).load(std::memory_order_acquire));
  if (!channel_) state.drained = state.isLost() || state.declared == Declared::kGone;
  return state;
}

PeerState Arbiter::stateOf(int rank) const {
  readProcesses();
  return known(rank);
}

std::vector<PeerState> Arbiter::states() const {
  readProcesses();
  std::vector<PeerState> all;
  for (int r = 0; r < size_; ++r) all.push_back(known(r));
  return all;
}

bool Arbiter::hasExited(int rank) const {
  return stateOf(rank).isLost() && ringreduce::hasExited(peer(rank).seat.process);
}

std::string Arbiter::howLost(int rank) const {
  const std::lock_guard lock(mutex_);
  return peer(rank).how;
}

bool Arbiter::isStopped(int rank) const {
  const Peer& one = peer(rank);
  const int pid = one.seat.process.pidfd ? pidSeenHere(one.seat.process.pidfd) : one.seat.pid;
  return (pid != 0 && ringreduce::isStopped(pid)) || one.observed == Observed::kStopped;
}

bool Arbiter::answers(int rank) const {
  if (!channel_) return true;
  const Nanos asked = now(), until = asked + kCensus;
  channel_->askForProgress(kNoOperation - 1);
  // Ranks do not repeat an answer at once.
  while (peer(rank).last_progress < asked - kSecond / 2 && now() < until) sleepMillisecond();
  return peer(rank).last_progress >= asked - kSecond / 2;
}

// Between hosts: whether it has not answered for a while, as a process that runs does, whatever it
// computes.
bool Arbiter::isSilent(int rank) const {
  return now() - std::max<Nanos>(peer(rank).last_progress, started_) > 2 * kSecond;
}

std::vector<int> Arbiter::stoppedOf(const std::vector<int>& ranks) const {
  std::vector<int> stopped;
  for (int r : ranks)
    if (isStopped(r)) stopped.push_back(r);
  return stopped;
}

std::vector<int> Arbiter::stoppedOnHost() {
  std::vector<int> stopped;
  for (int r = 0; r < size_; ++r)
    if (r != rank_ && peer(r).seat.pid != 0 && isStopped(r)) stopped.push_back(r);
  return stopped;
}

void Arbiter::recordLost(const std::vector<int>& ranks, Observed observed,
                         const std::string& how) const {
  const std::lock_guard lock(mutex_);
  for (int r : ranks) {
    Peer& one = peer(r);
    if (known(r).isLost()) continue;
    one.how = how;
    std::vector<int> others = ranks;
    std::erase(others, r);
    if (!others.empty()) one.how += "; nor can " + options_.rankList(others) + " be reached";
    one.lost_since = now();
    one.observed = observed;
  }
}

// ---- polling

void Arbiter::poll(int rank, Ready ready) {
  check();
  if (inline_ && options_.interrupt) options_.interrupt();
  // Also where a user's thread runs it: Python's signals reach the main one only.
  if (options_.interrupted && options_.interrupted(started_)) {
    abort("interrupted in " + textOf(current_));
    throwFailure();
  }
  waits_for_.store(rank, std::memory_order_relaxed);
  compareSignatures();
  if (channel_)
    askNowAndThen();  // the transport, which knows what is still in flight, reports lost ranks
  else
    blameMissing(rank, ready);
  const Nanos time = now();
  if (time >= deadline_ && !ready()) {
    refreshProgress();
    compareSignatures();
    if (ready()) return;
    const Laggards late = laggards(rank);
    if (min_ranks_ > 0 && !channel_ && evict(rank, late.ranks, ready)) return;
    std::string text =
        late.text + ": " + textOf(current_) + " timed out after a timeout of " + seconds(timeout_);
    if (current_.kind == Kind::kMonitoredBarrier)
      text = monitoredBarrierText(late.ranks) + ". " + text;
    // The others go on without a rank whose process does not run: see culprit().
    if (min_ranks_ > 0 && channel_) {
      for (const int r : late.ranks)
        if (isStopped(r) || isSilent(r)) fail(Failure::kPeerLost, r, text);
      if (!std::exchange(has_more_time_, true)) {  // it may have been stopped until now
        deadline_ = time + kTimeToGoOn;
        return;
      }
    }
    fail(Failure::kTimeout, late.ranks.front(), text);
  }
  if (time >= next_report_ && !ready()) {
    next_report_ = time + std::max(time - started_, kSecond);
    log("rank " + options_.shown(rank_) + " of group '" + options_.name + "' has waited " +
        seconds(time - started_) + " in " + textOf(current_) + ": " + laggards(rank).text);
  }
}

// Compares the announcements of the ranks.  Between hosts no data reveals the mismatch if two ranks
// wait for each other in different operations, or if one waits for a rank that sends nothing in
// that operation and has gone on.  So a rank compares the latest known operation of each other rank
// with its own operation of the same number.  Of two ranks, the one that is further ahead finds the
// mismatch.
void Arbiter::compareSignatures() {
  for (int r = 0; r < size_; ++r) {
    bool differs = false;
    uint64_t sequence = 0;
    {
      const std::lock_guard lock(mutex_);
      const uint64_t announced = page(r).announced.observe();
      sequence = channel_ ? announced - 1 : current_.sequence;
      if (r == rank_ || announced == 0 || announced <= sequence) continue;
      const OpSignature& theirs = page(r).announcements[sequence % kAnnouncements];
      const OpSignature& own = page(rank_).announcements[sequence % kAnnouncements];
      differs = theirs != own && (!channel_ || theirs.sequence == own.sequence);
    }
    if (differs) mismatch(r, nullptr, sequence);
  }
}

// Where all ranks share memory.  A lost rank or one that left is missing if it never announced this
// operation, or if this wait is for it.  Its earlier writes are visible by now, so `ready` is asked
// once more.
void Arbiter::blameMissing(int rank, Ready ready) {
  const std::vector<PeerState> all = states();
  for (int r = 0; r < size_; ++r) {
    if (r == rank_ || isAbsent(r) || all[static_cast<size_t>(r)].isHere()) continue;
    if ((hasAnnounced(r) && r != rank) || ready()) continue;
    if (min_ranks_ > 0)
      goOnWithout(r);
    else
      failLost(r, (hasAnnounced(r) ? "during " : "before it came to ") + textOf(current_));
  }
}

std::vector<int> Arbiter::live() const {
  std::vector<int> live;
  for (int r = 0; r < size_; ++r)
    if (!isAbsent(r)) live.push_back(r);
  return live;
}

// A rank that has left writes nothing more either.  The lost rank may have used up the deadline, so
// the others get more time.
void Arbiter::goOnWithout(int rank) {
  const std::string when =
      (hasAnnounced(rank) ? "during " : "before it came to ") + textOf(current_);
  const int left = static_cast<int>(live().size()) - 1;
  if (left < min_ranks_)
    failLost(rank, when + "; " + std::to_string(left) + (left == 1 ? " rank is" : " ranks are") +
                       " left, and min_ranks is " + std::to_string(min_ranks_));
  deadline_ = std::max(deadline_, deadlineIn(std::min(timeout_, kTimeToGoOn)));
  if (known(rank).isLost()) leaveOut(page(rank));
  peer(rank).absent = true;
  if (live().front() != rank_) return;  // one line is enough
  log(howAbsent(rank) + ", " + when + " of group '" + options_.name + "'; " + std::to_string(left) +
      " of " + std::to_string(size_) + (left == 1 ? " ranks goes on" : " ranks go on"));
}

// At a deadline: kills those of the late ranks that are stopped, and leaves ranks out that do not
// answer, since their processes do not run.  First it gives them time, since all ranks may have
// been stopped, and be resumed one by one.  Returns whether the wait is over or goes on without a
// rank that is gone now, also if another rank has done this; if not, the operation times out.
bool Arbiter::evict(int waited_for, const std::vector<int>& late, Ready ready) {
  const Nanos began = now();
  // A rank that is gone already changes nothing any more, unless this wait is about to go on
  // without it: it may have announced the operation before, and done its part.
  std::vector<int> ranks = live();
  const size_t not_absent = ranks.size();
  std::erase_if(ranks, [&](int r) { return r != rank_ && !stateOf(r).isHere(); });
  blameMissing(waited_for, ready);
  if (live().size() < not_absent) return true;
  const auto pulses = [&](int r) {
    return std::atomic_ref(page(r).pulses).load(std::memory_order_acquire);
  };
  std::vector<uint32_t> before;
  for (const int r : ranks) {
    before.push_back(pulses(r));
    wakeSleeper(page(r).pulse_wake_word);
  }
  const std::string timed_out =
      ": " + textOf(current_) + " timed out after a timeout of " + seconds(timeout_);
  // If too few ranks would be left, the group fails in any case: no process ends for that.
  const auto too_many = [&](const std::vector<int>& lost) {
    return ranks.size() < lost.size() + static_cast<size_t>(min_ranks_);
  };
  bool killed = false, left_out = false;
  for (; !failed() && now() < began + kTimeToGoOn; sleepMillisecond()) {
    if (ready()) return true;
    if (std::ranges::any_of(ranks, [&](int r) { return r != rank_ && !stateOf(r).isHere(); }))
      return true;
    if (!killed && now() >= began + kCensus) {
      killed = true;
      const std::vector<int> stopped =
          too_many(stoppedOf(ranks)) ? std::vector<int>() : stoppedOf(late);
      for (const int r : stopped) {
        log("rank " + options_.shown(rank_) + " kills " + who(r) + ", which is stopped" +
            timed_out);
        kill(peer(r).seat.process.pidfd);
      }
    }
    if (left_out || now() < began + kAnswerTime) continue;
    left_out = true;
    std::vector<int> silent;
    for (size_t i = 0; i < ranks.size(); ++i)
      if (ranks[i] != rank_ && pulses(ranks[i]) == before[i]) silent.push_back(ranks[i]);
    if (too_many(silent)) break;
    for (const int r : silent) {
      log("rank " + options_.shown(rank_) + " leaves " + who(r) +
          " out, whose process does not answer" + timed_out);
      leaveOut(page(r));
    }
  }
  return ready();
}

void Arbiter::endOperation(int rank) {
  throw Error(Failure::kPeerLost,
              howAbsent(rank) + "; rank " + options_.shown(rank_) + " needs its data in " +
                  textOf(current_) + ". Group '" + options_.name + "' goes on without it.",
              factsOf(rank, rank_, false));
}

// All ranks that wait need the progress of the others, and all receive the answers to one question.
// So the first rank asks, and each other one a little later than the rank before it, if none did.
void Arbiter::askNowAndThen() {
  const Nanos time = now();
  if (time < next_question_) return;
  const Nanos next = last_answer_ + kSecond + kSecond * rank_ / size_;
  if (time < next) {
    next_question_ = next;
    return;
  }
  next_question_ = time + kSecond;
  channel_->askForProgress();
}

// The rank that this one waits for may be healthy and wait for a lost rank.
void Arbiter::idle(Ready ready) {
  for (int r = 0; r < size_ && channel_; ++r) {
    if (!known(r).isLost() || now() - peer(r).lost_since < kNewsTime || ready()) continue;
    broken(r, kProcessEnded);
  }
}

void Arbiter::broken(int rank, const std::string& how) {
  // The control ring is about to say more.
  for (const Nanos until = deadlineIn(kNewsTime);
       !failed() && stateOf(rank).isHere() && now() < until;)
    sleepMillisecond();
  check();
  // Between hosts, its announcement may be unknown here.
  failLost(rank, (hasAnnounced(rank) ? "during " : "before it was seen in ") + textOf(current_),
           how);
}

void Arbiter::verify(int rank) {
  if (page(rank).announcements[current_.sequence % kAnnouncements] != current_) mismatch(rank);
}

void Arbiter::verify(int rank, const OpSignature& theirs) {
  recordSignature(rank, theirs.sequence, theirs);
  if (theirs != current_) mismatch(rank, &theirs);
}

void Arbiter::disagree(int sender, int receiver, uint64_t sent, uint64_t expected) {
  const auto elements = [](uint64_t n) {
    return std::to_string(n) + (n == 1 ? " element" : " elements");
  };
  fail(Failure::kMismatch, sender,
       "ranks disagree on " + textOf(current_) + ": rank " + options_.shown(sender) + " sends " +
           elements(sent) + " to rank " + options_.shown(receiver) + ", which expects " +
           elements(expected));
}

// ---- late ranks

void Arbiter::refreshProgress() const {
  if (!channel_) return check();
  const Nanos asked = now(), until = asked + kCensus;
  channel_->askForProgress();
  const auto all_answered = [&] {
    for (int r = 0; r < size_; ++r)
      if (r != rank_ && peer(r).last_progress < asked - kSecond / 2) return false;
    return true;
  };
  while ((now() < asked + kReadTime || !all_answered()) && !failed() && now() < until)
    sleepMillisecond();
  check();
}

// The sum of all flags that the rank has moved: how far it has come.
uint64_t Arbiter::progressOf(int r) const {
  RankPage& own = page(r);
  return own.posted.observe() + own.reduced.observe() + own.done.observe() +
         page((r + 1) % size_).inbound.observe() + page((r + size_ - 1) % size_).outbound.observe();
}

// `absent` are the ranks that have not arrived.  Returns the ranks to blame: the stopped ones; if
// none is stopped, those that announced the fewest operations, since the others may wait for them.
std::vector<int> Arbiter::lastOf(const std::vector<int>& absent) const {
  std::vector<int> last = stoppedOf(absent);
  if (!last.empty()) return last;
  uint64_t least = UINT64_MAX;
  for (int r : absent) {
    const uint64_t come = page(r).announced.observe();
    if (come > least) continue;
    if (come < least) last.clear();
    least = come;
    last.push_back(r);
  }
  return freeOf(std::move(last));
}

// Some of these ranks may wait for others of them.  Returns those that wait for none.
std::vector<int> Arbiter::freeOf(std::vector<int> ranks) const {
  std::vector<int> free = ranks;
  std::erase_if(free, [&](int r) { return heldUpBy(r) != r; });
  return free.empty() ? ranks : free;
}

int Arbiter::heldUpBy(int rank) const {
  // A stopped rank may have received by now what it waited for.
  for (int steps = 0; channel_ && steps < size_ && !isStopped(rank); ++steps) {
    const int next = waitsFor(rank);
    if (next < 0 || next == rank_) break;
    rank = next;
  }
  return rank;
}

Arbiter::Laggards Arbiter::laggards(int waited_for) const {
  Laggards late;
  std::vector<int> absent;
  for (int r = 0; r < size_; ++r)
    if (r != rank_ && !isAbsent(r) && !hasAnnounced(r)) absent.push_back(r);
  if (!absent.empty()) {
    const bool names_all = current_.kind == Kind::kMonitoredBarrier;
    late.ranks = names_all ? freeOf(absent) : lastOf(absent);
    late.text = whereabouts(late.ranks) + " did not arrive";
    std::erase_if(absent, [&](int r) { return std::ranges::count(late.ranks, r) > 0; });
    if (!absent.empty()) late.text += "; late too: " + whereabouts(absent);
    return late;
  }
  // All have arrived: blame a stopped process, else the rank that has come least far, or between
  // hosts the end of the chain in which one rank waits for another.
  int slowest = waited_for;
  bool stopped = false;
  for (int r = 0; r < size_ && !stopped; ++r) {
    if (r == rank_ || isAbsent(r)) continue;
    stopped = isStopped(r);
    if (stopped || (!channel_ && progressOf(r) < progressOf(slowest))) slowest = r;
  }
  if (!stopped) slowest = heldUpBy(slowest);
  late.ranks = {slowest};
  late.text = who(slowest) + (stopped ? " arrived but stopped moving data: its process is stopped"
                                      : " arrived but has not done its part");
  return late;
}

// ---- mismatches

Arbiter::Census Arbiter::census(uint64_t first, int other, const OpSignature* sent) const {
  const std::lock_guard lock(mutex_);
  Census found;
  for (found.sequence = first;; ++found.sequence) {
    const uint64_t sequence = found.sequence;
    found.parties.clear();
    for (int r = 0; r < size_; ++r) {
      const OpSignature* theirs = nullptr;
      if (page(r).announced.observe() > sequence) {
        theirs = &page(r).announcements[sequence % kAnnouncements];
        // A mirror may not hold this operation, or not any more.
        if (channel_ && theirs->sequence != sequence) {
          const bool over = theirs->sequence != kNoOperation && theirs->sequence > sequence;
          found.complete = found.complete && (over || !known(r).isHere());
          theirs = nullptr;
        }
      } else {
        found.complete = found.complete && (channel_ || min_ranks_ > 0) && !known(r).isHere();
      }
      if (!theirs && sent && r == other && sequence == current_.sequence) theirs = sent;
      if (!theirs) continue;
      auto party = std::ranges::find_if(found.parties,
                                        [&](const Party& p) { return p.operation == *theirs; });
      if (party == found.parties.end())
        party = found.parties.insert(party, {.operation = *theirs, .ranks = {}});
      party->ranks.push_back(r);
    }
    if (found.parties.size() > 1 || sequence == current_.sequence) return found;
  }
}

void Arbiter::mismatch(int other, const OpSignature* sent, uint64_t about) {
  // Ask for the others' calls, to tell the majority from the minority.  They may disagree about
  // this operation, or about one in which this rank did not wait.
  const Nanos until = deadlineIn(channel_ ? kRemoteCensus : kCensus);
  const uint64_t first = std::min(
      about, current_.sequence - std::min(current_.sequence, kAnnouncements - kMaxSlots - 1));
  Nanos next_ask = 0;
  Census found = census(first, other, sent);
  while (!found.complete && !failed() && now() < until) {
    if (channel_ && now() >= next_ask) {
      channel_->askForProgress(first);
      next_ask = now() + kCensusPeriod;
    }
    sleepMillisecond();
    // A rank that only sends runs ahead, and its later announcements replace what was found.
    Census again = census(first, other, sent);
    if (again.parties.size() > 1 || found.parties.size() < 2) found = std::move(again);
  }
  auto& [sequence, parties, complete] = found;
  // All announced the same, but the data that came were of another operation.
  if (parties.size() == 1 && sent) {
    std::erase(parties[0].ranks, other);
    parties.push_back({.operation = *sent, .ranks = {other}});
  }
  // The largest party is right; of equal ones, the first, which has the lowest rank.
  const auto right = std::max_element(
      parties.begin(), parties.end(),
      [](const Party& a, const Party& b) { return a.ranks.size() < b.ranks.size(); });
  std::string text = "ranks disagree on operation #" + std::to_string(sequence) + ": ";
  int culprit = -1;
  for (const Party& party : parties) {
    if (party.ranks == right->ranks) continue;
    if (culprit < 0) culprit = party.ranks.front();
    text += options_.rankList(party.ranks) + " called " + textOf(party.operation) + ", ";
  }
  if (culprit < 0) culprit = rank_;  // cannot happen: a mismatch makes at least two parties
  text += "where " + options_.rankList(right->ranks) + " called " + textOf(right->operation);
  fail(Failure::kMismatch, culprit, text);
}

// ---- ranks of other hosts

// Stores a signature in that rank's mirror.
void Arbiter::recordSignature(int rank, uint64_t sequence, const OpSignature& signature) {
  const std::lock_guard lock(mutex_);
  RankPage& mirror = page(rank);
  OpSignature& slot = mirror.announcements[sequence % kAnnouncements];
  // A late message does not replace what came after it.
  if (slot.sequence != kNoOperation && slot.sequence > sequence) return;
  slot = signature;
  if (mirror.announced.observe() <= sequence) mirror.announced.publish(sequence + 1);
}

void Arbiter::onProcessEnded(int rank, const std::string& how) {
  recordLost({rank}, Observed::kEnded, how);
  wakeAll();
}

void Arbiter::onPeersLost(const std::vector<int>& ranks, Observed observed,
                          const std::string& how) {
  recordLost(ranks, observed, how);
  for (int r : ranks) checkDrained(r);
  wakeAll();
}

void Arbiter::onDeparture(int rank, Declared how) {
  std::atomic_ref(page(rank).departed).store(static_cast<uint32_t>(how), std::memory_order_release);
  checkDrained(rank);
  wakeAll();
}

void Arbiter::onDisconnect(int rank, const std::string& how, bool damaged) {
  checkDrained(rank);
  wakeAll();
  if (std::exchange(peer(rank).disconnected, true)) return;
  // Both ranks may be healthy, and the network between them broken: no other rank sees that.
  channel_->callLater(damaged ? 0 : kExplainedTime, [this, rank, how] {
    if (!known(rank).isHere() || known(rank_).declared == Declared::kGone) return;
    decide({.kind = Failure::kPeerLost,
            .culprit = rank,
            .reporter = rank_,
            .text = who(rank) + " is lost: " + how});
  });
}

// An open connection may carry more of what a rank sent before it ended or left.
void Arbiter::checkDrained(int rank) {
  const PeerState state = known(rank);
  const bool sends_no_more =
      state.declared == Declared::kGone || state.observed == Observed::kEnded;
  if (sends_no_more && !channel_->mayReceiveFrom(rank)) peer(rank).drained = true;
}

void Arbiter::onRemoteError(const GroupFailure& failure) {
  decide(failure);
}

void Arbiter::onProgress(int rank, const net::Progress& progress) {
  for (const OpSignature& one : progress.earlier) recordSignature(rank, one.sequence, one);
  if (progress.announced > 0) recordSignature(rank, progress.announced - 1, progress.last);
  const std::lock_guard lock(mutex_);
  Peer& one = peer(rank);
  one.waits_for = progress.waits_for;
  one.streams = progress.streams;
  if (!progress.stopped) one.streams_heard = now();
  if (!known(rank).isLost()) one.observed = progress.stopped ? Observed::kStopped : Observed::kHere;
  last_answer_ = one.last_progress = now();
}

net::Progress Arbiter::ownProgress(uint64_t since) {
  const std::lock_guard lock(mutex_);
  RankPage& own = page(rank_);
  net::Progress progress;
  progress.waits_for = waits_for_.load(std::memory_order_relaxed);
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

void Arbiter::publishStreams(const StreamProgress& own) {
  const std::lock_guard lock(mutex_);
  peer(rank_).streams = own;
}

std::pair<StreamProgress, Nanos> Arbiter::streamsOf(int rank) const {
  const std::lock_guard lock(mutex_);
  const Peer& one = peers_[static_cast<size_t>(rank)];
  return {one.streams, one.streams_heard};
}

// ---- texts

// PyTorch's words for monitored_barrier: the ranks that did not arrive, and the one that waited.
std::string Arbiter::monitoredBarrierText(const std::vector<int>& late) const {
  const long ms = timeout_ / kMillisecond;
  std::string text = late.size() > 1 ? "Ranks " : "Rank ";
  text += joined(options_.shownAs(late), ", ");
  text += " failed to pass monitoredBarrier in " + std::to_string(ms) + " ms";
  if (late.size() > 1) text += ", Rank " + options_.shown(late.front()) + " first";
  return text + ". Rank " + options_.shown(rank_) + " timed out in monitoredBarrier";
}

// With the root's rank as users know it.
std::string Arbiter::textOf(OpSignature operation) const {
  if (operation.root != kNoRoot) operation.root = options_.shownAs(operation.root);
  return describe(operation);
}

std::string Arbiter::who(int r) const {
  return "rank " + options_.shown(r) + " (" + peer(r).seat.name + ")";
}

std::string Arbiter::howAbsent(int r) const {
  const PeerState state = known(r);
  return who(r) + (state.isLost()   ? " is lost: " + howLost(r)
                   : state.isHere() ? " is left out, since it did not answer in time"
                                    : " has left");
}

std::string Arbiter::details(int r) const {
  std::string text = peer(r).seat.name;
  if (isStopped(r)) text += ", stopped";
  const uint64_t done = page(r).announced.observe();
  if (done == 0) return text + ", no collective so far" + waitOf(r);
  OpSignature last;
  {
    const std::lock_guard lock(mutex_);
    last = page(r).announcements[(done - 1) % kAnnouncements];
  }
  return text + ", last seen in " + textOf(last) + waitOf(r);
}

void Arbiter::setAwaitedMessage(const AwaitedMessage& message) {
  std::atomic_ref(page(rank_).awaited_message).store(message.word(), std::memory_order_relaxed);
}

AwaitedMessage Arbiter::awaitedMessageOf(int r) const {
  return AwaitedMessage::of(
      std::atomic_ref(page(r).awaited_message).load(std::memory_order_relaxed));
}

// The rank that it waits for, as far as known; else -1.
int Arbiter::waitsFor(int r) const {
  if (!channel_) return awaitedMessageOf(r).peer;
  return now() - peer(r).last_progress > 3 * kSecond ? -1 : peer(r).waits_for.load();
}

std::string Arbiter::waitOf(int r) const {
  const AwaitedMessage message = awaitedMessageOf(r);
  if (message.exists && message.peer < 0) return ", waits to receive from any rank";
  const int awaited = waitsFor(r);
  if (awaited < 0) return "";
  if (!message.exists) return ", waits for data from rank " + options_.shown(awaited);
  return (message.is_send ? ", waits to send to rank " : ", waits to receive from rank ") +
         options_.shown(awaited);
}

std::string Arbiter::whereabouts(const std::vector<int>& ranks) const {
  std::string text = options_.rankList(ranks) + " (";
  for (int r : ranks) {
    if (r != ranks.front()) text += "; ";
    text += details(r);
  }
  return text + ")";
}

}  // namespace ringreduce
