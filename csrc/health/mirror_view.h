// The view of ranks of several hosts: copies of their pages in this process's own memory, which the
// control ring and the headers of data bring up to date.
//
// A rank says how far it has come only if it is asked; all ranks receive the answer.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "control/control.h"
#include "health/peer_view.h"

namespace ringreduce {

// Connects a rank with ranks that share no memory with it.
class PeerChannel {
 public:
  virtual ~PeerChannel() = default;
  virtual void broadcastFailure(const GroupFailure& failure) = 0;
  virtual void depart(Declared how) = 0;
  // Asks all ranks for their progress; answers arrive as onProgress().  With `since`, the answers
  // include the operations announced from that one on, and the question is sent at once.
  virtual void askForProgress(uint64_t since = kNoOperation) = 0;
  // Tells that rank, with which this one shares no memory, that it has new messages, or room to
  // send.
  virtual void wakePeer(int rank) = 0;

  // ---- in the reactor's thread
  // Whether a connection for messages from that rank is open.
  virtual bool mayReceiveFrom(int rank) = 0;
  // Calls `then` after `delay`, unless the channel is closed before.
  virtual void callLater(Nanos delay, std::function<void()> then) = 0;
};

class MirrorView final : public PeerView, public net::Control::Listener {
 public:
  MirrorView(int rank, std::vector<Seat> seats, const GroupOptions& options, PeerChannel& channel)
      : PeerView(rank, std::move(seats), options, /*leaves_out=*/false),
        channel_(channel),
        disconnected_(static_cast<size_t>(size_)) {}

  std::vector<int> missing(uint64_t, int) const override { return {}; }
  std::vector<int> lostFor(Nanos time) const override;
  uint64_t progressOf(int) const override { return 0; }
  int waitsFor(int rank) const override;
  int heldUpBy(int rank) const override;
  uint64_t toCompare(int rank, uint64_t) const override {
    return page(rank).announced.observe() - 1;  // the last one that is known
  }
  void ask(uint64_t since) const override { channel_.askForProgress(since); }
  Nanos askAgain(Nanos time) const override;
  bool await(const std::vector<int>& ranks, uint64_t since, Nanos least,
             const std::function<bool()>& over) const override;
  Nanos answerTime() const override { return limits::kCalls; }
  ClockOffset clock() const override { return {.ahead = ahead_, .error = clock_error_}; }
  void announce(const Announcement& call) override { record(rank_, call.sequence, call); }
  void wakeMessenger(int rank) override;
  void tell(const GroupFailure& failure) override { channel_.broadcastFailure(failure); }
  void reportTo(std::function<void(const GroupFailure&)> decide) override {
    decide_ = std::move(decide);
  }

  // A connection for messages with that rank ended.  If the reason is not known soon, the group
  // fails: messages are missing.  `damaged`: invalid bytes arrived, so no other
  // reason will follow.  In the reactor's thread.
  void onDisconnect(int rank, const std::string& how, bool damaged);

  // ---- Control::Listener, in the reactor's thread
  void onPeersLost(const std::vector<int>& ranks, Observed observed,
                   const std::string& how) override;
  void onDeparture(int rank, Declared how) override;
  void onRemoteFailure(const GroupFailure& failure) override { decide_(failure); }
  void onProgress(int rank, const net::Progress& progress) override;
  net::Progress ownProgress(uint64_t since) override;
  std::vector<int> stoppedOnHost() override;
  void onClock(const ClockOffset& offset) override;

 private:
  bool isDrained(int rank, const PeerState&) const override { return peer(rank).drained; }
  void tellDeparture(Declared how) override { channel_.depart(how); }
  void checkDrained(int rank);

  PeerChannel& channel_;
  std::function<void(const GroupFailure&)> decide_;
  std::vector<bool> disconnected_;  // by rank; in the reactor's thread
  std::atomic<Nanos> last_answer_ = 0;
  std::atomic<Nanos> ahead_ = 0, clock_error_ = kNever;
};

}  // namespace ringreduce
