// A group's health: which operation runs, who is alive, and the verdict that ends it.
//
// The session is the Watch of every wait.  While a rank waits, the session looks for what flags
// cannot tell: a dead process, a rank that left, one that announced another operation, the
// deadline, Ctrl-C.
//
// Blame.  The first rank to find a cause writes its text into its own page and then sets the
// group's verdict, one word, by compare-and-swap; whoever fails later finds it set and raises the
// same error. So a survivor that leaves after an error is never taken for the cause, and a rank
// that is killed while it reports leaves no half verdict.  A verdict is final: the group is of no
// more use.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "base/error.h"
#include "group/options.h"
#include "group/rendezvous.h"
#include "wire/page.h"
#include "wire/watch.h"

namespace ringreduce {

class Session final : public Watch {
 public:
  Session(int rank, const Membership& membership, const GroupOptions& options);

  // An operation starts to run; throws if the group has failed.  `in_users_thread`: Ctrl-C may
  // end it.
  void begin(const Announcement& operation, Nanos timeout, bool in_users_thread);

  void end() { in_monitored_barrier_ = false; }

  // Ends the group, unless it has ended already, and throws its verdict.
  [[noreturn]] void fail(Failure kind, int culprit, const std::string& text);
  // The same without throwing, from any thread.
  void abort(const std::string& why);
  // Throws if the group has failed.
  void check() const;

  // How far this rank has left normally; what it posted stays readable.
  void depart(Departure how);

  // About other ranks, for who waits for messages.
  Departure departureOf(int r) const;
  std::vector<bool> endedProcesses() const;
  // "rank 2 (pid 7 on host a)"
  std::string who(int r) const;
  // The same with what it was last seen doing, and whether it is stopped.
  std::string whereabouts(const std::vector<int>& ranks) const;
  std::vector<int> stoppedOf(const std::vector<int>& ranks) const;
  Page& page(int r) const { return *pages_[static_cast<size_t>(r)]; }
  [[noreturn]] void throwVerdict() const;

  // Why the group has failed; kNone while it has not.
  Failure failure() const {
    return static_cast<Failure>(verdict().load(std::memory_order_acquire) >> 48);
  }

  bool failed() const override { return verdict().load(std::memory_order_acquire) != 0; }
  void poll(int rank, Ready ready) override;
  void verify(int rank) override;
  [[noreturn]] void disagree(int sender, int receiver, uint64_t sent, uint64_t expected) override;

 private:
  std::atomic_ref<uint64_t> verdict() const { return std::atomic_ref(page(0).verdict); }
  bool hasAnnounced(int r) const { return page(r).announced.observe() > current_.sequence; }
  bool hasDeparted(int r) const { return departureOf(r) != Departure::kHere; }
  uint64_t progressOf(int r) const;

  void report(Failure kind, int culprit, const std::string& text);
  [[noreturn]] void lost(int rank, bool process_ended);
  [[noreturn]] void mismatch();
  // Who keeps the others waiting, and how: "rank 2 (pid 7 on host a) did not arrive".
  struct Laggards {
    std::vector<int> ranks;
    std::string text;
  };
  Laggards laggards(int waited_for) const;
  std::vector<int> lastOf(const std::vector<int>& absent) const;
  // "pid 7 on host a, stopped, last seen in barrier #3"
  std::string details(int r) const;
  std::string told(Announcement operation) const;
  std::string monitored(const std::vector<int>& late) const;

  const int rank_, size_;
  const GroupOptions& options_;
  std::vector<Page*> pages_;
  std::vector<std::shared_ptr<Fd>> processes_;
  std::vector<std::string> names_;  // "pid 7 on host a"
  std::vector<int> pids_;

  Announcement current_;
  uint64_t history_ = 0;
  bool inline_ = false;
  std::atomic<bool> in_monitored_barrier_{false};  // also asked by who waits for messages
  Nanos started_ = 0, deadline_ = kNever, timeout_ = 0, next_report_ = 0;
};

}  // namespace ringreduce
