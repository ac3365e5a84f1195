// The control ring carries the state of ranks on different hosts: which ranks are alive, which have
// left, why the group has failed, and the progress of each rank.
//
// The ranks form a ring.  Each rank has one control connection to the rank before it and one to the
// rank after it.  News travels in both directions: each rank forwards what is new to it.  Each
// connection carries a heartbeat every half second.  The reactor's thread always reads the
// connections, so a rank that computes or is stopped in a debugger is never reported as lost.
//
//   A process ends.        The kernel closes its sockets.  Its neighbours report it to all
//                          (ControlNode::onDisconnect), whose arbiters learn it by onPeersLost().
//   A host is lost.        Its kernel no longer acknowledges heartbeats.  TCP_USER_TIMEOUT
//                          (RINGREDUCE_LOST_SECONDS, 3) then ends the connection.  The kernel of a
//                          stopped process still acknowledges.
//   The network is cut.    Same detection, on both sides.  Two cuts split the ring; each side names
//                          the ranks that it cannot reach.  If one connection alone is cut, its two
//                          ends name each other and the other ranks receive their failure.
//
// Ranks do not see cuts at the same time.  So a rank waits for a little more than one heartbeat
// before it reports a lost rank.  Ranks of one host should be neighbours in the ring: then the loss
// of one host separates no other ranks.
//
// *Gaps.*  Ranks leave at any time, and the ring must stay closed.  A rank that leaves announces it
// (kGone) and keeps its connections in flush() until both remaining neighbours say that they no
// longer need it.  By then the rank before the gap has connected to the rank after it (`dial`,
// `accept`).  A neighbour that leaves as well does not need it.  So the remaining ranks
// stay connected, in whatever order ranks leave.  If all ranks leave at once, each waits for one
// reply at most.  Both ends of a new connection send all they know, so no news is lost.  A gap that
// a lost rank leaves is closed in the same way.  A rank that cannot connect to the next one tries
// the ranks beyond it, which know whether those between are lost.  If no rank knows, the ranks that
// do not answer are reported as lost after RINGREDUCE_LOST_SECONDS.
//
// A Control belongs to one group on one rank.  It calls its listener in the reactor's thread, once
// for each event.  There is one failure: the first that this rank received or broadcast.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "control/control_frames.h"
#include "transport/tcp/connector.h"
#include "transport/tcp/reactor.h"
#include "transport/tcp/socket.h"

namespace ringreduce::net {

class ControlNode;

class Control {
 public:
  struct Listener {
    virtual ~Listener() = default;
    // The processes of these ranks have ended (kEnded), or they can no longer be reached
    // (kUnreachable).  `how` is the reason: "its process ended", "no packet from its host came for
    // 3 s".  Not called after a failure or after this rank's own departure.
    virtual void onPeersLost(const std::vector<int>& ranks, Observed observed,
                             const std::string& how) = 0;
    virtual void onDeparture(int rank, Declared how) = 0;
    virtual void onRemoteFailure(const GroupFailure& failure) = 0;
    virtual void onProgress(int rank, const Progress& progress) = 0;
    // The progress of this rank, for another rank that asked.  If `since` is not kNoOperation, the
    // answer includes all operations announced from that one on.
    virtual Progress ownProgress(uint64_t since) = 0;
    // Other ranks of this host whose processes are stopped; called together with ownProgress(). All
    // ranks then see their last progress, marked as stopped.
    virtual std::vector<int> stoppedOnHost() { return {}; }
    // How far this host's clock is ahead of the group's; called for each new measurement.
    virtual void onClock(const ClockOffset& /*offset*/) {}
  };

  struct Options {
    Nanos heartbeat = 500 * kMillisecond;
    Nanos lost_after = 3 * kSecond;  // RINGREDUCE_LOST_SECONDS
    std::vector<int> ring = {};      // all ranks in the ring's order; empty: 0, 1, ...
    std::vector<int> hosts = {};     // of each rank, whose clock its ranks share; empty: all differ
    bool goes_on = false;            // a loss does not end the ring: the others go on
  };

  // `next` and `previous` are proven connections to the two neighbours in the ring: with two ranks,
  // two connections to the same rank; with one rank, none.  `dial` makes a new connection, which
  // the other side receives through accept(); an attempt ends after `lost_after`.  The listener
  // must outlive the Control.
  static std::unique_ptr<Control> start(std::shared_ptr<Reactor> reactor, int rank, int size,
                                        Socket next, Socket previous, Dial dial, Listener& listener,
                                        const Options& options);
  ~Control();  // the listener is not called after this returns

  // Takes a control connection that another rank made.  From any thread.
  void accept(int from, Socket socket);

  // From any thread.  These do not wait for the network.
  // Up to kMostText bytes of its text travel (control_frames.h).
  void broadcastFailure(const GroupFailure& failure);
  void depart(Declared how);
  // Asks all ranks for their progress and sends that of this rank.  `onProgress` is called for each
  // answer, also when another rank asked.  At most one question per `heartbeat` is sent, and none
  // within half of that time after another rank's; a rank does not repeat an answer within that
  // half.
  //
  // With `since`, ranks also send the operations that they announced from that one on.  These
  // limits do not apply to such a question, and a rank answers it if it has anything new to send.
  void askForProgress(uint64_t since = kNoOperation);
  // Waits until the neighbours' kernels have acknowledged all news, so that closing loses none, and
  // after depart(kGone) until the neighbours no longer need this rank.  Returns false after
  // `longest`.  Does not wait in the reactor's thread.
  bool flush(Nanos longest);

 private:
  Control(std::shared_ptr<Reactor> reactor, std::shared_ptr<ControlNode> node);
  template <class F>
  void soon(F f);

  const std::shared_ptr<Reactor> reactor_;
  const std::shared_ptr<ControlNode> node_;
};

}  // namespace ringreduce::net
