// What a rank knows of the ranks of its group: their pages and processes, whether they are here,
// the operations that they have announced, whom they wait for, and how texts name them.
//
// There are two views.  Where all ranks share memory, the pages are theirs (shared_view.h). Between
// hosts they are mirrors: each rank has its own copy of all pages, which news of the others bring
// up to date (mirror_view.h).
//
// Any thread may call it, unless a function says otherwise.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/limits.h"
#include "base/op_signature.h"
#include "bootstrap/host_memory.h"
#include "bootstrap/options.h"
#include "bootstrap/process.h"
#include "transport/shm/page.h"
#include "transport/wait_guard.h"

namespace ringreduce {

// A rank, as known from the start.
struct Seat {
  RankPage* page;
  ProcessFds process;  // none if it is on another host
  std::string name;    // "pid 7 on host a"
  int pid;             // if it is on this host and `process` has nothing; else 0
  // 1 while it sleeps and waits for messages; null if it shares no memory with this rank.
  uint32_t* messenger_word = nullptr;
};
std::vector<Seat> seatsOf(const HostMemory& host_memory);

class PeerView {
 public:
  // `leaves_out`: ranks that do not answer are left out of the group (health/pulse.h).
  PeerView(int rank, std::vector<Seat> seats, const GroupOptions& options, bool leaves_out);
  virtual ~PeerView() = default;
  PeerView(const PeerView&) = delete;
  PeerView& operator=(const PeerView&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const GroupOptions& options() const { return options_; }
  RankPage& page(int rank) const { return *peer(rank).seat.page; }
  // Where this rank sleeps while it waits for messages.
  uint32_t& messengerWord() const { return *peer(rank_).seat.messenger_word; }

  // ---- what each view answers in its own way

  // In shared memory: the ranks that are gone while operation `sequence`, which waits for rank
  // `waited_for`, needs them.  Between hosts none: the transport, which knows what is still in
  // flight, reports them.
  virtual std::vector<int> missing(uint64_t sequence, int waited_for) const = 0;
  // Between hosts: the ranks that have been lost for that long.
  virtual std::vector<int> lostFor(Nanos time) const = 0;
  // How far a rank has come within an operation; equal for all if that is not known.
  virtual uint64_t progressOf(int rank) const = 0;
  // The rank that `rank` waits for, as far as known; else -1.
  virtual int waitsFor(int rank) const = 0;
  // The rank that `rank` waits for, directly or through other waiting ranks, as far as known;
  // itself if it waits for none.
  virtual int heldUpBy(int rank) const { return rank; }
  // Which call of that rank to compare with this rank's, in operation `sequence`.
  virtual uint64_t toCompare(int rank, uint64_t sequence) const = 0;

  // Asks all ranks for their progress, without waiting.  `since`: see PeerChannel.
  virtual void ask(uint64_t /*since*/) const {}
  // The same during a long wait, at `time`; returns when to do so again.
  virtual Nanos askAgain(Nanos /*time*/) const { return kNever; }
  // Asks, and waits briefly, but for `least`, until `ranks` have answered, or others have told of
  // them, or until `over`.  Returns whether they have.
  virtual bool await(const std::vector<int>& /*ranks*/, uint64_t /*since*/, Nanos /*least*/,
                     const std::function<bool()>& /*over*/) const {
    return true;
  }
  // How long the calls of all ranks may take to be known.
  virtual Nanos answerTime() const { return limits::kAnswer; }
  // How far this host's clock is ahead of the group's.
  virtual ClockOffset clock() const { return {.ahead = 0, .error = 0}; }

  // This rank announces an operation.
  virtual void announce(const Announcement& call) = 0;
  // Tells that rank that it has new messages, or room to send.
  virtual void wakeMessenger(int rank) = 0;
  // Tells the others of a failure that this rank has found.
  virtual void tell(const GroupFailure& /*failure*/) {}
  // Receives failures that others have found.
  virtual void reportTo(std::function<void(const GroupFailure&)> /*decide*/) {}
  // At a deadline in a group that survives losses: kills those of the `late` ranks that are
  // stopped, and leaves those of `ranks` out that do not answer, since their processes do not run,
  // if `least` ranks are left then.  First it gives them time, since all ranks may have been
  // stopped, and be resumed one by one.  Returns whether a rank is gone or `over`.  `why`: for the
  // log.
  virtual bool evict(const std::vector<int>& /*ranks*/, const std::vector<int>& /*late*/,
                     size_t /*least*/, const std::function<bool()>& over,
                     const std::string& /*why*/) {
    return over();
  }

  // ---- the state of ranks

  // In shared memory, a rank that ended or left is always drained: all its writes are visible.
  // Its data may have come since the last look, so look once more before it is reported as lost.
  PeerState stateOf(int rank) const;
  std::vector<PeerState> states() const;
  // The same without a look at the processes.
  PeerState known(int rank) const;
  // Whether that rank is lost and the kernels of its GPUs do not run any more either (process.h).
  bool hasExited(int rank) const;
  // Why that rank is lost, as text after "is lost: ".
  std::string howLost(int rank) const;
  bool isStopped(int rank) const;
  // Those of `ranks` whose processes are stopped.
  std::vector<int> stoppedOf(const std::vector<int>& ranks) const;
  // Whether its process runs: it is not stopped, and answers a question in a short time, as a
  // process that runs does, whatever it computes.
  bool answers(int rank) const;
  // Between hosts: whether it has told nothing for a while, nor since that time.
  bool isSilent(int rank, Nanos since = 0) const {
    return now() - std::max<Nanos>(peer(rank).heard, since) > limits::kSilent;
  }

  // A rank is absent once operations go on without it.
  bool isAbsent(int rank) const { return peer(rank).absent; }
  void setAbsent(int rank) { peer(rank).absent = true; }
  std::vector<int> live() const;  // all but the absent
  // This rank is left out: the others go on without it.
  bool isLeftOut() const { return leaves_out_ && ringreduce::isLeftOut(page(rank_)); }

  // This rank leaves or is gone.  Data that it posted stays readable.
  void depart(Declared how);
  // The process of a rank of this host has ended, which the view has no descriptor to see.
  void onEnded(int rank, const std::string& how);
  // All threads of this process, or of all ranks that share memory, that wait.
  void wakeAll() const;

  // ---- operations

  bool hasAnnounced(int rank, uint64_t sequence) const {
    return page(rank).announced.observe() > sequence;
  }
  // What each rank has told of operation `sequence`; `arrived` is 0 if it has not.
  std::vector<Announcement> calls(uint64_t sequence) const;
  // Compares one call of `rank` with this rank's.  Returns its number if they differ.
  std::optional<uint64_t> findDifference(int rank, uint64_t sequence) const;
  // The calls of all ranks in the first operation in which ranks are known to differ.
  struct Party {
    OpSignature operation;
    std::vector<int> ranks;
  };
  struct Census {
    uint64_t sequence = 0;
    std::vector<Party> parties;
    bool complete = true;  // the calls of all ranks that are here, up to this one, are known
  };
  // From operation `first` to `last`.  `sent`: what rank `other` sent in the last, if it sent one.
  Census census(uint64_t first, uint64_t last, int other, const OpSignature* sent) const;
  // Stores the call of a rank in its mirror.  Only between hosts: in shared memory a page has one
  // writer, its rank.
  void record(int rank, uint64_t sequence, const Announcement& call);

  // ---- waits

  // A thread of this rank waits for that message, or for none any more.
  void setAwaitedMessage(const AwaitedMessage& message);
  // The rank whose data this rank's collective waits for, or -1.
  void setAwaitedRank(int rank) { awaited_rank_.store(rank, std::memory_order_relaxed); }

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

 protected:
  struct Peer {
    Seat seat;
    std::atomic<Observed> observed = Observed::kHere;
    std::atomic<bool> drained = false;
    std::atomic<bool> absent = false;      // operations go on without it
    std::atomic<Nanos> lost_since = 0;     // when it was first known to be lost
    std::string how;                       // why it is lost; guarded by the mutex
    std::atomic<int> waits_for = -1;       // between hosts, as its last progress says
    std::atomic<Nanos> last_progress = 0;  // when that arrived
    std::atomic<Nanos> heard = 0;          // the same, if the rank itself told it
    StreamProgress streams;                // between hosts; guarded by the mutex
  };

  Peer& peer(int rank) const { return peers_[static_cast<size_t>(rank)]; }
  void recordLost(const std::vector<int>& ranks, Observed observed, const std::string& how) const;
  AwaitedMessage awaitedMessageOf(int rank) const;

  // Brings the states up to date.
  virtual void look() const {}
  // Whether no more bytes come from a rank in that state.
  virtual bool isDrained(int rank, const PeerState& state) const = 0;
  virtual void tellDeparture(Declared how) = 0;

  const int rank_, size_;
  const GroupOptions& options_;
  const bool leaves_out_;
  // By rank.  A question may bring them up to date.
  mutable std::vector<Peer> peers_;
  mutable std::mutex mutex_;  // guards changes of peers_, and mirrors of pages
  std::atomic<int> awaited_rank_ = -1;

 private:
  // The call of a rank, if it is known.
  const Announcement* callOf(int rank, uint64_t sequence) const;
  std::string details(int rank) const;
  // "", or ", waits to receive from rank 1"
  std::string waitOf(int rank) const;
};

}  // namespace ringreduce
