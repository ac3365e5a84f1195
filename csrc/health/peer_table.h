// What a rank knows of the ranks of its group: their pages and processes, whether they are here,
// the operations that they have announced, whom they wait for, and how texts name them.
//
// Where all ranks share memory, the pages are theirs.  Between hosts they are mirrors: each rank
// has its own copy of all pages, which the control ring and the headers of data bring up to date.
//
// Any thread may call it, unless a function says otherwise.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/limits.h"
#include "base/op_signature.h"
#include "bootstrap/membership.h"
#include "bootstrap/options.h"
#include "bootstrap/process.h"
#include "control/control.h"
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

// Connects a rank with ranks that share no memory with it.
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

class PeerTable {
 public:
  // `channel` is null if all ranks share the pages.  `leaves_out`: ranks that do not answer are
  // left out of the group (health/pulse.h).
  PeerTable(int rank, std::vector<Seat> seats, const GroupOptions& options, PeerChannel* channel,
            bool leaves_out);

  int rank() const { return rank_; }
  int size() const { return size_; }
  const GroupOptions& options() const { return options_; }
  bool areMirrors() const { return channel_ != nullptr; }
  RankPage& page(int rank) const { return *peer(rank).seat.page; }
  const ProcessFds& processOf(int rank) const { return peer(rank).seat.process; }

  // ---- the state of ranks

  // In shared memory, a rank that ended or left is always drained: all its writes are visible.
  // Its data may have come since the last look, so look once more before it is reported as lost.
  PeerState stateOf(int rank) const;
  std::vector<PeerState> states() const;
  // The same without a look at the processes.
  PeerState known(int rank) const;
  // Whether that rank is lost and the kernels of its GPUs do not run any more either (process.h).
  bool hasExited(int rank) const;
  // Why that rank is lost, as text after "is lost: ", and when that was first known.
  std::string howLost(int rank) const;
  Nanos lostSince(int rank) const { return peer(rank).lost_since; }
  bool isStopped(int rank) const;
  // Those of `ranks` whose processes are stopped.
  std::vector<int> stoppedOf(const std::vector<int>& ranks) const;
  std::vector<int> stoppedOnHost() const;
  // Whether its process runs: it is not stopped, and answers a question for its progress in a short
  // time, whatever it computes.  Those that share memory always do, if they are not stopped.
  bool answers(int rank) const;
  // Between hosts: asks all ranks for their progress, and waits briefly, but for `least`, until
  // `ranks` have answered, or others have told of them, or until `over`.  `since`: see PeerChannel.
  // Returns whether they have.
  bool ask(const std::vector<int>& ranks, uint64_t since, Nanos least,
           const std::function<bool()>& over) const;
  // Between hosts: whether it has told nothing for a while, nor since that time.
  bool isSilent(int rank, Nanos since = 0) const {
    return now() - std::max<Nanos>(peer(rank).heard, since) > limits::kSilent;
  }
  // When any rank last did.
  Nanos lastAnswer() const { return last_answer_; }

  // A rank is absent once operations go on without it.
  bool isAbsent(int rank) const { return peer(rank).absent; }
  void setAbsent(int rank) { peer(rank).absent = true; }
  std::vector<int> live() const;  // all but the absent
  // This rank is left out: the others go on without it.
  bool isLeftOut() const { return leaves_out_ && ringreduce::isLeftOut(page(rank_)); }

  // ---- operations

  // Stores the call of a rank in its mirror.
  void record(int rank, uint64_t sequence, const Announcement& call);
  bool hasAnnounced(int rank, uint64_t sequence) const {
    return page(rank).announced.observe() > sequence;
  }
  // Between hosts: what each rank has told of operation `sequence`; `arrived` is 0 if it has not.
  std::vector<Announcement> calls(uint64_t sequence) const;
  // Compares one call of `rank` with this rank's: that of operation `sequence`, or between hosts
  // the last one that is known of it.  Returns its number if they differ.
  std::optional<uint64_t> findDifference(int rank, uint64_t sequence) const;
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
  // From operation `first` to `last`.  `sent`: what rank `other` sent in the last, if it sent one.
  // `losses_allowed`: it is complete without the ranks that are gone.
  Census census(uint64_t first, uint64_t last, int other, const OpSignature* sent,
                bool losses_allowed) const;

  // ---- waits

  // A thread of this rank waits for that message, or for none any more.
  void setAwaitedMessage(const AwaitedMessage& message);
  // The rank whose data this rank's collective waits for, or -1.
  void setAwaitedRank(int rank) { waits_for_.store(rank, std::memory_order_relaxed); }
  // The rank that `rank` waits for, as far as known; else -1.
  int waitsFor(int rank) const;
  // The rank that `rank` waits for, directly or through other waiting ranks, as far as known;
  // itself if it waits for none.
  int heldUpBy(int rank) const;

  // The progress of this rank's GPU streams, which other ranks receive when they ask; and that of
  // another rank.
  void publishStreams(const StreamProgress& own);
  StreamProgress streamsOf(int rank) const;

  // ---- texts

  // "rank 2 (pid 7 on host a)"
  std::string who(int rank) const;
  // The same of a rank that is lost or has left, and how.
  std::string howAbsent(int rank) const;
  // The same, with the last operation seen and whether the process is stopped.
  std::string whereabouts(const std::vector<int>& ranks) const;
  // With the root's rank as users know it.
  std::string textOf(OpSignature operation) const;

  // ---- news

  void recordLost(const std::vector<int>& ranks, Observed observed, const std::string& how) const;
  void recordProgress(int rank, const net::Progress& progress);
  net::Progress ownProgress(uint64_t since) const;
  // In the reactor's thread: an open connection may carry more of what a rank sent before it ended
  // or left.
  void checkDrained(int rank);
  // In the reactor's thread: a connection for messages with it ended.  False if that was known.
  bool recordDisconnect(int rank) { return !std::exchange(peer(rank).disconnected, true); }

 private:
  struct Peer {
    Seat seat;
    std::atomic<Observed> observed = Observed::kHere;
    std::atomic<bool> drained = false;     // between hosts
    std::atomic<bool> absent = false;      // operations go on without it
    std::atomic<Nanos> lost_since = 0;     // when it was first known to be lost
    std::string how;                       // why it is lost; guarded by the mutex
    std::atomic<int> waits_for = -1;       // between hosts, as its last progress says
    std::atomic<Nanos> last_progress = 0;  // when that arrived
    std::atomic<Nanos> heard = 0;          // the same, if the rank itself told it
    bool disconnected = false;             // in the reactor's thread
    StreamProgress streams;                // between hosts; guarded by the mutex
  };

  Peer& peer(int rank) const { return peers_[static_cast<size_t>(rank)]; }
  void readProcesses() const;
  AwaitedMessage awaitedMessageOf(int rank) const;
  std::string details(int rank) const;
  // "", or ", waits to receive from rank 1"
  std::string waitOf(int rank) const;

  const int rank_, size_;
  const GroupOptions& options_;
  PeerChannel* const channel_;
  const bool leaves_out_;
  // By rank.  A question may bring them up to date.
  mutable std::vector<Peer> peers_;
  std::vector<ProcessFds> processes_;
  mutable std::mutex mutex_;  // guards changes of peers_, and mirrors of pages
  std::atomic<int> waits_for_ = -1;
  std::atomic<Nanos> last_answer_ = 0;
};

}  // namespace ringreduce
