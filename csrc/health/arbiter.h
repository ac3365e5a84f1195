// The arbiter of a group decides why the group has failed, and knows the state of each rank.
//
// Sources report to it:
//
//   shared pages     departures, announced operations   read in poll() and stateOf()
//   pidfds, pipes    ended processes                    read in poll() and stateOf()
//   control ring     the same of ranks of other hosts, their progress and failures
//   connections      broken connections for messages (onDisconnect)
//   waits            deadlines, Ctrl-C, mismatches (WaitGuard), errors of callers (fail)
//
// Between hosts, pages are mirrors: each rank has its own copy of all pages, updated by the control
// ring and by the headers of data.  A lost rank is reported by the rank that waits for its data, or
// by a rank whose wait makes no progress (idle).  All other ranks receive that failure.
//
// The first cause wins.  The rank that finds it writes the text into its own page, and then sets
// the group's failure, one word, by compare-and-swap.  A rank that fails later finds the word set
// and raises the same error.  So a rank that leaves after an error is never blamed for it, and a
// rank that is killed while it reports leaves no partial failure.  Between hosts each rank keeps
// the first failure that it receives; if two are found at the same time, ranks may raise different
// ones.  A failure is final: the group cannot be used any more.
//
// A group in shared memory that survives losses (SharedOptions::min_ranks) does not fail when a
// rank ends or leaves.  The rank is *absent* from then on, once this rank's own wait has found it
// gone.  A rank whose process is stopped at a deadline is killed.  A process that does not run
// cannot always be seen or killed: its cgroup is frozen, or it is in another PID namespace.  So in
// such a group each rank has a thread that answers (Pulse), and a rank that does not is left out
// (transport/shm/page.h).  If it runs again, its next call raises PeerLost.  Between hosts a loss
// fails the epoch (group/epoch.h), and a new one takes its place.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/fd.h"
#include "bootstrap/membership.h"
#include "bootstrap/options.h"
#include "bootstrap/process.h"
#include "health/control.h"
#include "transport/shm/page.h"
#include "transport/wait_guard.h"

namespace ringreduce {

// A rank, as known from the start.
struct Seat {
  RankPage* page;
  ProcessFds process;  // none if it is on another host
  std::string name;    // "pid 7 on host a"
  int pid;             // if it is on this host and `process` has nothing; else 0
};
std::vector<Seat> seatsOf(const Membership& membership);

// Connects the arbiter with ranks that share no memory with this one.
class PeerChannel {
 public:
  virtual ~PeerChannel() = default;
  virtual void broadcastError(const GroupFailure& failure) = 0;
  virtual void depart(Declared how) = 0;
  // Asks all ranks for their progress; answers arrive as onProgress().  With `since`, the answers
  // include the operations announced from that one on, and the question is sent at once.
  virtual void askForProgress(uint64_t since = kNoOperation) = 0;
  // Tells that rank that it has new messages, or room to send.
  virtual void wakePeer(int rank) = 0;

  // ---- in the reactor's thread
  // Whether a connection for messages from that rank is open.
  virtual bool mayReceiveFrom(int rank) = 0;
  // Calls `then` after `delay`, unless the channel is closed before.
  virtual void callLater(Nanos delay, std::function<void()> then) = 0;
};

// A thread that answers other ranks, whatever the program does, as long as its process runs.
class Pulse {
 public:
  explicit Pulse(RankPage& page);  // of this rank
  ~Pulse();

 private:
  void run();

  RankPage& page_;
  const int generation_ = forkGeneration();
  std::atomic<bool> stopping_ = false;
  std::thread* thread_ = nullptr;  // never deleted in a child, where there is no such thread
};

// How the texts of failures end.
inline constexpr char kGroupGoesOn[] =
    ". Messages that were under way are lost; the group goes on with its next collective.";
inline constexpr char kGroupHasFailed[] = ". The group has failed: destroy it and make a new one.";

// Of the ranks in a failure word, which has 24 bits for each; as the culprit it is kNobody.
inline constexpr int kLargestRank = 0xffffff;

class Arbiter final : public WaitGuard, public net::Control::Listener {
 public:
  // `channel` is null if all ranks share the pages.  `min_ranks`: as in SharedOptions.
  Arbiter(int rank, std::vector<Seat> seats, const GroupOptions& options,
          PeerChannel* channel = nullptr, int min_ranks = 0);

  // Starts an operation.  Throws if the group has failed.  `in_users_thread`: Ctrl-C can end it.
  void begin(const OpSignature& operation, Nanos timeout, bool in_users_thread);
  // Throws if the others have left this rank out meanwhile: then its result may be wrong.
  void end();
  const OpSignature& current() const { return current_; }  // the operation that runs

  // Marks this rank as leaving or gone.  Data that it posted stays readable.
  void depart(Declared how);

  // ---- the failure

  // Fails the group, unless it has failed already, and throws its failure.
  [[noreturn]] void fail(Failure kind, int culprit, const std::string& text);
  // The same for a rank that is lost or has left.  `when`: "during barrier #3".  `how`: why it is
  // lost, if the arbiter does not know.
  [[noreturn]] void failLost(int rank, const std::string& when, const std::string& how = {});
  // The same for a message to or from `peer` (-1: from any rank) that is not `done` in time.
  // `missing`: "rank 1 (...) did not send it".
  [[noreturn]] void failLate(int peer, const std::string& missing, const std::string& doing,
                             Nanos timeout);
  // For a message to or from `ranks`, all of which are gone: fails the group if one of them is
  // lost.  If they have left, or the group survives losses, returns the error of this message
  // alone.
  Error errorOfGone(const std::vector<int>& ranks, const std::string& doing);
  // Fails the group without throwing, from any thread.
  void abort(const std::string& why);
  // Throws if the group has failed.
  void check() const;
  // Sequentially consistent: a rank looks here between setting its wake word and sleeping.
  bool failed() const override {
    return failureWord().load(std::memory_order_seq_cst) != 0 || isLeftOut();
  }
  // Which rank is to blame for the failure, if there is one; or kNobody.
  int culprit() const {
    if (isLeftOut()) return rank_;
    const auto rank =
        static_cast<int>(failureWord().load(std::memory_order_acquire) >> 24) & kLargestRank;
    return rank == kLargestRank ? kNobody : rank;
  }
  int reporter() const {
    if (isLeftOut()) return rank_;
    return static_cast<int>(failureWord().load(std::memory_order_acquire) & 0xffffff);
  }
  // Why the group has failed, or kNone.  For a rank that is left out it has: kPeerLost.
  Failure failure() const {
    if (isLeftOut()) return Failure::kPeerLost;
    return static_cast<Failure>(failureWord().load(std::memory_order_acquire) >> 48);
  }

  // ---- the state of ranks, from any thread

  // In shared memory, a rank that ended or left is always drained: all its writes are visible.
  PeerState stateOf(int rank) const override;
  std::vector<PeerState> states() const;
  // Whether that rank is lost and the kernels of its GPUs do not run any more either (process.h).
  bool hasExited(int rank) const;
  // Why that rank is lost, as text after "is lost: ".
  std::string howLost(int rank) const;
  // A thread of this rank waits for that message, or for none any more.
  void setAwaitedMessage(const AwaitedMessage& message);
  // Those of `ranks` whose processes are stopped.
  std::vector<int> stoppedOf(const std::vector<int>& ranks) const;
  // The rank that `rank` waits for, directly or through other waiting ranks, as far as known.
  int heldUpBy(int rank) const;
  // Whether a rank of another host answers a question for its progress in a short time, as a
  // process that runs does, whatever it computes.  Those that share memory always do.
  bool answers(int rank) const;
  // Waits briefly for the other ranks' progress before one is blamed for being late: this rank may
  // be the one that was stopped.  Throws if the group has failed.
  void refreshProgress() const;
  // The progress of this rank's GPU streams, which other ranks receive when they ask; and that of
  // another rank, with the time of its last answer (0: none).
  void publishStreams(const StreamProgress& own);
  std::pair<StreamProgress, Nanos> streamsOf(int rank) const;
  // "rank 2 (pid 7 on host a)"
  std::string who(int rank) const;
  // The same of a rank that is lost or has left, and how.
  std::string howAbsent(int rank) const;
  // The same, with the last operation seen and whether the process is stopped.
  std::string whereabouts(const std::vector<int>& ranks) const;

  RankPage& page(int rank) const { return *peers_[static_cast<size_t>(rank)].seat.page; }
  void wakeMessenger(int rank);

  // ---- sources; from any thread

  // For ranks of this host, if the arbiter has no descriptors of their processes.
  void onProcessEnded(int rank, const std::string& how);
  // A connection for messages with that rank ended.  If the reason is not known soon, the group
  // fails: messages are missing.  `damaged`: invalid bytes arrived, so no other
  // reason will follow.  In the reactor's thread.
  void onDisconnect(int rank, const std::string& how, bool damaged);

  // ---- Control::Listener, in the reactor's thread
  void onPeersLost(const std::vector<int>& ranks, Observed observed,
                   const std::string& how) override;
  void onDeparture(int rank, Declared how) override;
  void onRemoteError(const GroupFailure& failure) override;
  void onProgress(int rank, const net::Progress& progress) override;
  net::Progress ownProgress(uint64_t since) override;
  std::vector<int> stoppedOnHost() override;

  // ---- WaitGuard
  void poll(int rank, Ready ready) override;
  void idle(Ready ready) override;
  void verify(int rank) override;
  void verify(int rank, const OpSignature& theirs) override;
  [[noreturn]] void broken(int rank, const std::string& how) override;
  [[noreturn]] void disagree(int sender, int receiver, uint64_t sent, uint64_t expected) override;
  bool isAbsent(int rank) const override { return peer(rank).absent; }
  [[noreturn]] void endOperation(int rank) override;

 private:
  // How long a rank that found a mismatch waits for the other ranks, to find the minority.
  static constexpr Nanos kCensus = 300 * kMillisecond;

  struct Peer {
    Seat seat;
    std::atomic<Observed> observed = Observed::kHere;
    std::atomic<bool> drained = false;     // between hosts
    std::atomic<bool> absent = false;      // operations go on without it
    std::atomic<Nanos> lost_since = 0;     // when it was first known to be lost
    std::string how;                       // why it is lost; guarded by the mutex
    std::atomic<int> waits_for = -1;       // between hosts, as its last progress says
    std::atomic<Nanos> last_progress = 0;  // when that arrived
    bool disconnected = false;             // in the reactor's thread
    StreamProgress streams;                // between hosts; guarded by the mutex, as the next
    Nanos streams_heard = 0;
  };
  // The calls of all ranks in the first operation in which ranks are known to differ.
  struct Party {
    OpSignature operation;
    std::vector<int> ranks;
  };
  struct Census {
    uint64_t sequence = 0;
    std::vector<Party> parties;
    bool complete = true;  // the calls of all ranks, up to this one, are known
  };
  // The ranks that the others wait for, and a text: "rank 2 (pid 7 on host a) did not arrive".
  struct Laggards {
    std::vector<int> ranks;
    std::string text;
  };

  Peer& peer(int rank) const { return peers_[static_cast<size_t>(rank)]; }
  std::atomic_ref<uint64_t> failureWord() const { return std::atomic_ref(page(0).failure); }
  bool hasAnnounced(int rank) const { return page(rank).announced.observe() > current_.sequence; }

  // the failure
  void decide(const GroupFailure& failure);
  [[noreturn]] void throwFailure() const;
  int firstOfAny() const;
  Facts factsOf(int culprit, int reporter, bool is_final) const;
  void wakeAll();
  // the state of ranks
  void readProcesses() const;
  PeerState known(int rank) const;
  void recordLost(const std::vector<int>& ranks, Observed observed, const std::string& how) const;
  void recordSignature(int rank, uint64_t sequence, const OpSignature& signature);
  void checkDrained(int rank);
  bool isStopped(int rank) const;
  // polling
  void compareSignatures();
  void blameMissing(int rank, Ready ready);
  // A loss in a group that survives it.
  std::vector<int> live() const;  // all but the absent
  void goOnWithout(int rank);
  bool isLeftOut() const { return pulse_ && ringreduce::isLeftOut(page(rank_)); }
  bool evict(int waited_for, const std::vector<int>& late, Ready ready);
  bool isSilent(int rank) const;
  void askNowAndThen();
  // blame
  // Rank `other` called another operation.  `sent` is the signature that it sent, if it sent one.
  // `about` is the sequence number if the mismatch is in an earlier operation.
  [[noreturn]] void mismatch(int other, const OpSignature* sent = nullptr,
                             uint64_t about = kNoOperation);
  Census census(uint64_t first, int other, const OpSignature* sent) const;
  Laggards laggards(int waited_for) const;
  std::vector<int> lastOf(const std::vector<int>& absent) const;
  std::vector<int> freeOf(std::vector<int> ranks) const;
  uint64_t progressOf(int rank) const;
  // texts
  std::string details(int rank) const;
  AwaitedMessage awaitedMessageOf(int rank) const;
  int waitsFor(int rank) const;
  // "", or ", waits to receive from rank 1"
  std::string waitOf(int rank) const;
  std::string textOf(OpSignature operation) const;
  std::string monitoredBarrierText(const std::vector<int>& late) const;

  const int rank_, size_;
  const GroupOptions& options_;
  PeerChannel* const channel_;
  const int min_ranks_;
  // By rank.  A question may bring them up to date.
  mutable std::vector<Peer> peers_;
  std::vector<ProcessFds> processes_;
  mutable std::mutex mutex_;  // guards changes of peers_, and mirrors of pages
  std::atomic<int> waits_for_ = -1;
  Nanos next_question_ = 0;
  std::atomic<Nanos> last_answer_ = 0;  // when the last progress report arrived

  OpSignature current_;
  uint64_t history_ = 0;
  bool inline_ = false, has_more_time_ = false;
  std::atomic<bool> in_monitored_barrier_{false};  // also read by waits for messages
  Nanos started_ = 0, deadline_ = kNever, timeout_ = 0, next_report_ = 0;
  std::unique_ptr<Pulse> pulse_;
};

}  // namespace ringreduce
