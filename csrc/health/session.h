// A group's health: which operation runs, who is alive, and the verdict that ends it.
//
// The session is the Watch of every wait.  While a rank waits, the session looks for what flags
// cannot tell: a dead process, a rank that left, one that announced another operation, the
// deadline, Ctrl-C.
//
// Between hosts pages are mirrors: each rank has its own copy of everybody's, and an `Outside` that
// carries what is written there to the others' (group/network.h).  Then no rank knows at once how
// far the others are, so a rank that is gone is missed by who waits for it, or in vain for anybody
// (idle), and all learn of it by that one's verdict.
//
// Blame.  The first rank to find a cause writes its text into its own page and then sets the
// group's verdict, one word, by compare-and-swap; whoever fails later finds it set and raises the
// same error.  (Between hosts each keeps the first verdict that it hears of: of two that are found
// at the same time some ranks may raise the one and some the other.)  So a survivor that leaves
// after an error is never taken for the cause, and a rank that is killed while it reports leaves no
// half verdict.  A verdict is final: the group is of no more use.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.h"
#include "bootstrap/options.h"
#include "bootstrap/rendezvous.h"
#include "transport/shm/page.h"
#include "transport/watch.h"

namespace ringreduce {

// What has become of a rank.
enum class Presence : uint8_t {
  kHere,
  kLeft,   // the group, normally
  kEnded,  // its process; or it cannot be reached any more
};

// A rank as a session sees it.
struct Seat {
  Page* page;
  std::shared_ptr<Fd> process;  // null where it is not of this host, or not known
  std::string name;             // "pid 7 on host a"
  int pid;                      // 0 where it is not of this host
};
std::vector<Seat> seatsOf(const Membership& membership);

// The way to ranks that share no memory with this one.  Nothing here waits.
class Outside {
 public:
  virtual ~Outside() = default;
  virtual void tell(Failure kind, int culprit, const std::string& text) = 0;
  virtual void depart(Departure how) = 0;
  // Has everybody say how far it is; answers come into the pages.  With `since` also what it has
  // announced from that operation on, as soon as can be.
  virtual void ask(uint64_t since = kNoOperation) = 0;
  // There are messages for that rank, or room for its.
  virtual void stir(int rank) = 0;
};

class Session final : public Watch {
 public:
  // `outside` is null where all ranks share the pages.
  Session(int rank, std::vector<Seat> seats, const GroupOptions& options,
          Outside* outside = nullptr);

  // An operation starts to run; throws if the group has failed.  `in_users_thread`: Ctrl-C may
  // end it.
  void begin(const Announcement& operation, Nanos timeout, bool in_users_thread);

  void end() {
    in_monitored_barrier_ = false;
    waits_for_.store(-1, std::memory_order_relaxed);
  }

  // Ends the group, unless it has ended already, and throws its verdict.
  [[noreturn]] void fail(Failure kind, int culprit, const std::string& text);
  // The same without throwing, from any thread.
  void abort(const std::string& why);
  // Throws if the group has failed.
  void check() const;

  // How far this rank has left normally; what it posted stays readable.
  void depart(Departure how);

  const Announcement& current() const { return current_; }  // the operation that runs
  int waitsFor() const { return waits_for_.load(std::memory_order_relaxed); }

  // ---- What comes from outside; from any thread.
  void learn(Failure kind, int culprit, int reporter, const std::string& text);
  // These ranks are gone: `how` says why, in words that follow "is lost: ".  Who waits for their
  // data knows it at once; who waits for their messages once these have come (`hearOut`), unless
  // none can come any more.
  void lose(const std::vector<int>& ranks, PeerState fate, const std::string& how);
  void learnDeparture(int rank, Departure how);  // of kGone the same holds
  // All messages have come of a rank that has left, or whose process has ended.
  void hearOut(int rank);
  // A connection with that rank has ended and nobody has said why: if nobody knows now either, the
  // group ends, since what was under way is missing somewhere.
  void miss(int rank, const std::string& how);
  // How far a rank is, or was a moment ago.
  void see(int rank, uint64_t announced, const Announcement& last, int waits_for, bool stopped,
           const std::vector<Announcement>& earlier = {});

  // How far this rank is: operations announced, the latest of them, and those before it from
  // `since` on.
  void here(uint64_t& announced, Announcement& last, uint64_t since,
            std::vector<Announcement>& earlier) const;

  // Before a rank is blamed for being late: lets the others say how far they are, and what they
  // know already.  This rank may have been the one that was stopped.  Throws if the group has
  // failed.
  void hearOthers() const;

  // Who holds up rank r: the end of the chain in which one waits for another, as far as it is
  // known.
  int heldUpBy(int r) const;

  // Tells rank r's messenger that there is something for it.
  void ringMessenger(int r);

  // About other ranks, for who waits for messages.
  Departure departureOf(int r) const;
  std::vector<bool> endedProcesses() const;  // and ranks that cannot be reached
  // What follows "is lost: " of one of these.
  std::string howLost(int r) const;
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
  void idle(Ready ready) override;
  void verify(int rank) override;
  void verify(int rank, const Announcement& theirs) override;
  PeerState stateOf(int rank) const override;
  [[noreturn]] void broken(int rank, const std::string& how) override;
  [[noreturn]] void disagree(int sender, int receiver, uint64_t sent, uint64_t expected) override;

 private:
  static constexpr char kProcessEnded[] = "its process ended";
  // How long a rank that found a mismatch waits for the rest, to tell who is in the minority.
  static constexpr Nanos kCensus = 300 * kMillisecond;
  std::atomic_ref<uint64_t> verdict() const { return std::atomic_ref(page(0).verdict); }
  bool hasAnnounced(int r) const { return page(r).announced.observe() > current_.sequence; }
  bool hasDeparted(int r) const { return departureOf(r) != Departure::kHere; }
  uint64_t progressOf(int r) const;

  void report(Failure kind, int culprit, const std::string& text);
  [[noreturn]] void lost(int rank, bool process_ended);
  // Rank `other` is one that called something else; `sent` is what it said so with, if it did, and
  // `about` the operation, if it is an earlier one.
  [[noreturn]] void mismatch(int other, const Announcement* sent = nullptr,
                             uint64_t about = kNoOperation);
  // Who called what, in the first operation about which ranks are known to disagree.
  struct Party {
    Announcement operation;
    std::vector<int> ranks;
  };
  struct Census {
    uint64_t sequence = 0;
    std::vector<Party> parties;
    bool complete = true;  // all have told what they called in it, and in those before it
  };
  Census census(uint64_t first, int other, const Announcement* sent) const;
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

  // What is known of a rank from outside.
  struct Distant {
    std::atomic<PeerState> fate = PeerState::kHere;
    std::atomic<Nanos> lost_since = 0;    // when it was heard that the fate is no good one
    std::string how;                      // guarded by the mutex
    std::atomic<bool> gone = false;       // it has left
    std::atomic<bool> heard_out = false;  // none of its messages is on its way any more
    std::atomic<int> waits_for = -1;
    std::atomic<bool> stopped = false;
    std::atomic<Nanos> seen = 0;
  };
  bool isStoppedRank(int r) const;
  void pollTogether(int rank, Ready ready);
  void pollApart();
  void compareWhereabouts();
  void askNowAndThen();
  void mirror(int rank, uint64_t slot, const Announcement& theirs);
  void decide(Failure kind, int culprit, int reporter, const std::string& text);
  void wakeAll();

  const int rank_, size_;
  const GroupOptions& options_;
  Outside* const outside_;
  std::vector<Page*> pages_;
  std::vector<std::shared_ptr<Fd>> processes_;
  std::vector<std::string> names_;  // "pid 7 on host a"
  std::vector<int> pids_;
  std::vector<Distant> distant_;     // by rank; empty where all share the pages
  mutable std::mutex mirror_mutex_;  // of what is written into mirrors
  std::atomic<int> waits_for_ = -1;
  Nanos next_ask_ = 0;
  std::atomic<Nanos> last_answer_ = 0;  // when a rank last said how far it is

  Announcement current_;
  uint64_t history_ = 0;
  bool inline_ = false;
  std::atomic<bool> in_monitored_barrier_{false};  // also asked by who waits for messages
  Nanos started_ = 0, deadline_ = kNever, timeout_ = 0, next_report_ = 0;
};

}  // namespace ringreduce
