// The health of a group: which operation runs, which ranks are alive, and the verdict that ends the
// group.
//
// The arbiter is the WaitGuard of every wait.  While a rank waits, the arbiter checks what flags
// cannot show: a process that ended, a rank that left, a rank that announced another operation, the
// deadline, Ctrl-C.
//
// Between hosts, pages are mirrors: each rank has its own copy of all pages, and an `Outside`
// carries updates between them (group/network.h).  A rank then does not know at once how far the
// others are. A lost rank is reported by the rank that waits for its data, or by a rank whose wait
// makes no progress (idle).  The other ranks learn of it through that rank's verdict.
//
// Blame.  The first rank that finds a cause writes the text into its own page, and then sets the
// group's verdict, one word, by compare-and-swap.  A rank that fails later finds the verdict set
// and raises the same error.  Between hosts each rank keeps the first verdict that it receives; if
// two are found at the same time, ranks may raise different ones.  So a rank that leaves after an
// error is never blamed for it, and a rank that is killed while it reports leaves no partial
// verdict.  A verdict is final: the group cannot be used any more.
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
#include "transport/wait_guard.h"

namespace ringreduce {

// Whether a rank still takes part in the group.
enum class Presence : uint8_t {
  kHere,
  kLeft,   // the group, normally
  kEnded,  // its process ended, or it can no longer be reached
};

// What an arbiter knows of each rank from the start.
struct Seat {
  RankPage* page;
  std::shared_ptr<Fd> process;  // null if it is on another host or unknown
  std::string name;             // "pid 7 on host a"
  int pid;                      // 0 if it is on another host
};
std::vector<Seat> seatsOf(const Membership& membership);

// Carries news to ranks that share no memory with this one.  No call waits.
class Outside {
 public:
  virtual ~Outside() = default;
  virtual void tell(Failure kind, int culprit, const std::string& text) = 0;
  virtual void depart(Departure how) = 0;
  // Asks all ranks for their progress; answers update the pages.  With `since`, the answers include
  // the operations announced from that one on, and the question is sent at once.
  virtual void ask(uint64_t since = kNoOperation) = 0;
  // Tells that rank that it has new messages, or room to send.
  virtual void stir(int rank) = 0;
};

class Arbiter final : public WaitGuard {
 public:
  // `outside` is null if all ranks share the pages.
  Arbiter(int rank, std::vector<Seat> seats, const GroupOptions& options,
          Outside* outside = nullptr);

  // Starts an operation.  Throws if the group has failed.  `in_users_thread`: Ctrl-C can end it.
  void begin(const OpSignature& operation, Nanos timeout, bool in_users_thread);

  void end() {
    in_monitored_barrier_ = false;
    waits_for_.store(-1, std::memory_order_relaxed);
  }

  // Ends the group, unless it has failed already, and throws the verdict.
  [[noreturn]] void fail(Failure kind, int culprit, const std::string& text);
  // The same without throwing, from any thread.
  void abort(const std::string& why);
  // Throws if the group has failed.
  void check() const;

  // Marks this rank as leaving or gone.  Data that it posted stays readable.
  void depart(Departure how);

  const OpSignature& current() const { return current_; }  // the operation that runs
  int waitsFor() const { return waits_for_.load(std::memory_order_relaxed); }

  // ---- events from other hosts; from any thread
  void learn(Failure kind, int culprit, int reporter, const std::string& text);
  // These ranks are lost; `how` is the reason, as text after "is lost: ".  A wait for their data
  // learns it at once, and fails when no more data can arrive.  A wait for their messages learns it
  // after all have arrived (`hearOut`), or at once if none can arrive any more.
  void lose(const std::vector<int>& ranks, PeerState fate, const std::string& how);
  void learnDeparture(int rank, Departure how);  // waits learn of kGone in the same way
  // All messages of a rank that left, or whose process ended, have arrived.
  void hearOut(int rank);
  // A connection to that rank ended without a reason.  If there is still none, the group fails:
  // data that was in flight is missing.
  void miss(int rank, const std::string& how);
  // The progress of a rank.
  void see(int rank, uint64_t announced, const OpSignature& last, int waits_for, bool stopped,
           const std::vector<OpSignature>& earlier = {});

  // The progress of this rank: the number of operations announced, the latest, and those from
  // `since` on.
  void here(uint64_t& announced, OpSignature& last, uint64_t since,
            std::vector<OpSignature>& earlier) const;

  // Waits briefly for news from the other ranks before one is blamed for being late: this rank may
  // be the one that was stopped.  Throws if the group has failed.
  void hearOthers() const;

  // The rank that rank r waits for, directly or through other waiting ranks, as far as known.
  int heldUpBy(int r) const;

  // Wakes rank r's messenger.
  void ringMessenger(int r);

  // ---- the state of other ranks, for waits for messages
  Departure departureOf(int r) const;
  std::vector<bool> endedProcesses() const;  // true also for ranks that cannot be reached
  // The reason why such a rank is lost, as text after "is lost: ".
  std::string howLost(int r) const;
  // "rank 2 (pid 7 on host a)"
  std::string who(int r) const;
  // The same, with the last operation seen and whether the process is stopped.
  std::string whereabouts(const std::vector<int>& ranks) const;
  std::vector<int> stoppedOf(const std::vector<int>& ranks) const;
  RankPage& page(int r) const { return *pages_[static_cast<size_t>(r)]; }
  [[noreturn]] void throwVerdict() const;

  // Why the group has failed, or kNone.
  Failure failure() const {
    return static_cast<Failure>(verdict().load(std::memory_order_acquire) >> 48);
  }

  bool failed() const override { return verdict().load(std::memory_order_acquire) != 0; }
  void poll(int rank, Ready ready) override;
  void idle(Ready ready) override;
  void verify(int rank) override;
  void verify(int rank, const OpSignature& theirs) override;
  PeerState stateOf(int rank) const override;
  [[noreturn]] void broken(int rank, const std::string& how) override;
  [[noreturn]] void disagree(int sender, int receiver, uint64_t sent, uint64_t expected) override;

 private:
  static constexpr char kProcessEnded[] = "its process ended";
  // How long a rank that found a mismatch waits for the other ranks, to find the minority.
  static constexpr Nanos kCensus = 300 * kMillisecond;
  std::atomic_ref<uint64_t> verdict() const { return std::atomic_ref(page(0).verdict); }
  bool hasAnnounced(int r) const { return page(r).announced.observe() > current_.sequence; }
  bool hasDeparted(int r) const { return departureOf(r) != Departure::kHere; }
  uint64_t progressOf(int r) const;

  void report(Failure kind, int culprit, const std::string& text);
  [[noreturn]] void lost(int rank, bool process_ended);
  // Rank `other` called another operation.  `sent` is the signature that it sent, if it sent one.
  // `about` is the sequence number if the mismatch is in an earlier operation.
  [[noreturn]] void mismatch(int other, const OpSignature* sent = nullptr,
                             uint64_t about = kNoOperation);
  // Which ranks called what, in the first operation in which ranks are known to differ.
  struct Party {
    OpSignature operation;
    std::vector<int> ranks;
  };
  struct Census {
    uint64_t sequence = 0;
    std::vector<Party> parties;
    bool complete = true;  // the calls of all ranks, up to this one, are known
  };
  Census census(uint64_t first, int other, const OpSignature* sent) const;
  // The ranks that the others wait for, and a text: "rank 2 (pid 7 on host a) did not arrive".
  struct Laggards {
    std::vector<int> ranks;
    std::string text;
  };
  Laggards laggards(int waited_for) const;
  std::vector<int> lastOf(const std::vector<int>& absent) const;
  // "pid 7 on host a, stopped, last seen in barrier #3"
  std::string details(int r) const;
  std::string told(OpSignature operation) const;
  std::string monitored(const std::vector<int>& late) const;

  // What other hosts reported of a rank.
  struct Distant {
    std::atomic<PeerState> fate = PeerState::kHere;
    std::atomic<Nanos> lost_since = 0;    // when it was reported as ended or unreachable
    std::string how;                      // guarded by the mutex
    std::atomic<bool> gone = false;       // it has left
    std::atomic<bool> heard_out = false;  // all its messages have arrived
    std::atomic<int> waits_for = -1;
    std::atomic<bool> stopped = false;
    std::atomic<Nanos> seen = 0;
  };
  bool isStoppedRank(int r) const;
  void pollTogether(int rank, Ready ready);
  void pollApart();
  void compareWhereabouts();
  void askNowAndThen();
  void mirror(int rank, uint64_t slot, const OpSignature& theirs);
  void decide(Failure kind, int culprit, int reporter, const std::string& text);
  void wakeAll();

  const int rank_, size_;
  const GroupOptions& options_;
  Outside* const outside_;
  std::vector<RankPage*> pages_;
  std::vector<std::shared_ptr<Fd>> processes_;
  std::vector<std::string> names_;  // "pid 7 on host a"
  std::vector<int> pids_;
  std::vector<Distant> distant_;     // by rank; empty where all share the pages
  mutable std::mutex mirror_mutex_;  // guards writes into mirrors
  std::atomic<int> waits_for_ = -1;
  Nanos next_ask_ = 0;
  std::atomic<Nanos> last_answer_ = 0;  // when the last progress report arrived

  OpSignature current_;
  uint64_t history_ = 0;
  bool inline_ = false;
  std::atomic<bool> in_monitored_barrier_{false};  // also read by waits for messages
  Nanos started_ = 0, deadline_ = kNever, timeout_ = 0, next_report_ = 0;
};

}  // namespace ringreduce
