// An attempt to make a group: its end from outside, and its time.
//
// Every wait for another rank in bootstrap/ goes by an AttemptClock, and times out by it.  A
// barrier that ends the making of a group is an operation, with an operation's timeout. Each rank
// has one until all ranks have met (bootstrap/rendezvous.h), and then one until ranks that share no
// memory are connected (bootstrap/host_links.h).
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/text.h"
#include "base/wait_clock.h"
#include "bootstrap/options.h"

namespace ringreduce {

// An attempt to make a group that can be ended from outside, in a part of the store that no other
// attempt uses.
class Attempt {
 public:
  // `what` the end of it is, for the error: "rank 1 gave up while the group was made".
  explicit Attempt(std::string what) : what_(std::move(what)) {}
  virtual ~Attempt() = default;
  // Rank 0's: called once the other ranks can find it, before any of them learns that all are
  // there.  Throws Error to end the attempt on all ranks.
  virtual void claim() { check(); }
  // Called in every wait while the group is made.  Throws Error to end the attempt on all ranks.
  virtual void poll(Nanos /*waited*/) { check(); }
  // From any thread.  The first reason counts; it is a literal.
  void end(const char* why) {
    const char* none = nullptr;
    why_.compare_exchange_strong(none, why);
  }
  // Throws if it was ended.
  void check() const {
    if (why_.load()) throw Error(Failure::kAborted, text());
  }
  // What the end is, and why.
  std::string text() const {
    const char* why = why_.load();
    return why ? what_ + ": " + why : what_;
  }

 private:
  const std::string what_;
  std::atomic<const char*> why_ = nullptr;
};

// How long a part of making a group has taken, and may take: the timeout of the options.
class AttemptClock {
 public:
  // The period of polling for events that cannot wake a waiting process.
  static constexpr Nanos kTick = 50 * kMillisecond;

  // `rank`: this one, for the log.
  AttemptClock(const GroupOptions& options, int rank) : options_(options), rank_(rank) {}

  Nanos waited() const { return wait_.waited(); }
  // How long this process was stopped meanwhile, which does not count.
  Nanos stopped() const { return monotonicNow() - began_ - waited(); }
  // Asked by Meeting::stepClock (rendezvous.cc) and JoinGuard::giveUp (host_links.cc), which throw.
  bool over(Nanos grace = 0) const { return wait_.isOver(now() - grace); }

  // Called in every iteration of a waiting loop: lets Ctrl-C and the attempt end it, and logs a
  // stall now and then.  `missing` returns the text of the missing ranks.
  template <class Missing>
  void poll(Missing missing) {
    if (options_.interrupt) options_.interrupt();
    if (options_.attempt) options_.attempt->poll(waited());
    if (!wait_.reportIsDue()) return;
    log("rank " + std::to_string(options_.shownAs(rank_)) + ", making group '" + options_.name +
        "', has waited " + seconds(waited()) + " for " + missing());
  }

  // How long an iteration may sleep, in proportion to the time that has been waited: few looks are
  // in vain, and no rank waits much longer than it must.
  Nanos pause(Nanos least) const { return std::clamp<Nanos>(waited() / 4, least, kTick); }

  static void sleep(Nanos time) { std::this_thread::sleep_for(std::chrono::nanoseconds(time)); }
  // Whether it is time for what happens once a period.
  static bool due(Nanos& next, Nanos period = kTick) {
    if (now() < next) return false;
    next = now() + period;
    return true;
  }
  // Waits for a condition, for so long.
  template <class Condition>
  static void await(Condition condition, Nanos longest) {
    const Nanos limit = deadlineIn(longest);
    for (Nanos nap = kMillisecond; !condition() && now() < limit; nap = std::min(2 * nap, kTick))
      sleep(nap);
  }

 private:
  const GroupOptions& options_;
  const int rank_;
  const Nanos began_ = monotonicNow();
  WaitClock wait_{options_.timeout, options_.stall};
};

}  // namespace ringreduce
