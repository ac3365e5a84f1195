// What ranks on different hosts know of each other beside their data: who is alive, who has left,
// why the group has ended, and how far everybody is.
//
// The ranks form a ring, in which each has a control connection to the one before it and one to the
// one after it.  What is to be known by all goes round that ring both ways: each passes on what is
// new to it.  The connections carry a heartbeat every half second and are always read, by the
// reactor's thread, so a rank that computes, or is stopped in a debugger, is never taken for dead:
//
//   its process ended       its sockets close, and the ranks beside it say so to all
//   its host is gone        TCP_USER_TIMEOUT (RINGREDUCE_LOST_SECONDS, 3) ends a control connection
//                           whose heartbeats the other host's system does not acknowledge: a black
//                           hole, while the system of a stopped process still acknowledges
//   the network is cut      the same on both sides.  Two cuts part the ring: each side names the
//                           ranks that it cannot reach.  Where one connection alone is cut its two
//                           ends name each other, and the rest hear their verdict
//
// Cuts are not seen in the same moment, so they are given a heartbeat and a little more to be known
// before ranks are named.  If the ranks of a host stand beside each other in the ring, the end of
// one host parts nobody from the others.
//
// *Gaps.*  Ranks leave when they like, and the rest must still hear each other.  A rank that leaves
// says so (kGone) and goes on serving its connections in flush() until each neighbour that stays
// has told it that it is not needed any more: the one before the gap has then connected to the one
// after it (`dial`, `accept`).  Neighbours that leave too do not need it.  So those that stay are
// connected at any time, whoever leaves in whatever order, and when all leave at once nobody waits
// for more than an answer.  Over a new connection both ends tell all they know, so nothing that
// went round meanwhile is missed.  Gaps that the dead leave are closed in the same way.  Whoever
// cannot connect across a gap tries the ranks beyond: they know what became of those between.  If
// they do not, since whole stretches of the ring ended at once, those that answer nobody are lost
// too, after RINGREDUCE_LOST_SECONDS.
//
// This is of one group at one rank.  It tells what it learns to its listener, in the reactor's
// thread, each thing once.  There is one verdict: the first that comes, or is told, here.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "transport/tcp/dialler.h"
#include "transport/tcp/reactor.h"
#include "transport/tcp/socket.h"
#include "transport/watch.h"

namespace ringreduce::net {

// A group's end, as its first finder has it.
struct Verdict {
  Failure kind = Failure::kNone;
  int culprit = 0, reporter = 0;
  std::string text;  // travels up to kMostText bytes of it (control_frames.h)
};

// How far a rank is.
struct Whereabouts {
  uint64_t announced = 0;                  // operations announced
  Announcement last;                       // the latest of them
  std::vector<Announcement> earlier = {};  // those just before it, as far as it was asked for them
  int waits_for = -1;    // the rank whose turn it is, if it waits in that operation
  bool stopped = false;  // its process is (SIGSTOP, a debugger): told by a rank of its host

  bool operator==(const Whereabouts&) const = default;
};

// What `lost` says of a rank whose process has ended.
inline constexpr char kProcessEnded[] = "its process ended";

class Control {
 public:
  struct Listener {
    virtual ~Listener() = default;
    // Ranks whose processes have ended (kEnded), or that cannot be reached any more (kUnreachable):
    // `how` says why, "its process ended", "no packet from its host came for 3 s".  Not called
    // after a verdict or this rank's own departure.
    virtual void lost(const std::vector<int>& ranks, PeerState fate, const std::string& how) = 0;
    virtual void departed(int rank, Departure how) = 0;
    virtual void ended(const Verdict& verdict) = 0;
    virtual void seen(int rank, const Whereabouts& there) = 0;
    // Asked when another wants to know: with what was announced from that operation on, if it is
    // not kNoOperation.
    virtual Whereabouts own(uint64_t since) = 0;
    // Other ranks of this host whose processes are stopped; asked with own().  They are `seen`
    // everywhere as they were last, and stopped.
    virtual std::vector<int> stopped() { return {}; }
  };

  struct Options {
    Nanos heartbeat = 500 * kMillisecond;
    Nanos lost_after = 3 * kSecond;  // RINGREDUCE_LOST_SECONDS
    std::vector<int> ring = {};      // all ranks in the ring's order; empty: 0, 1, ...
  };

  // `next` and `previous` are proven connections to these ranks of the ring (for two ranks: two
  // connections to the same; for one: none).  `dial` makes another one, which the other side is
  // given through accept(); it is given up after `lost_after`.  The listener must outlive it.
  static std::unique_ptr<Control> start(std::shared_ptr<Reactor> reactor, int rank, int size,
                                        Socket next, Socket previous, Dial dial, Listener& listener,
                                        const Options& options);
  virtual ~Control() = default;  // no listener is called once this has returned

  // A control connection that another rank has made.  From any thread.
  virtual void accept(int from, Socket socket) = 0;

  // From any thread; none waits for the network.
  virtual void tell(const Verdict& verdict) = 0;
  virtual void depart(Departure how) = 0;
  // Asks everybody how far it is, and says it of this rank; `seen` is called for each that answers,
  // also where another has asked.  At most once in `heartbeat`, more often does nothing, nor does
  // it just after another's question: an answer that was given half that time ago is not given
  // again.
  // With `since` all tell what they have announced from that operation on.  Such a question is
  // asked however soon after another one, and answered by whoever has more to say than it last
  // said.
  virtual void ask(uint64_t since = kNoOperation) = 0;
  // Waits, no longer than `longest`, until what was told has reached the systems of the neighbours
  // (so that closing loses nothing of it), and after depart(kGone) until they do without this rank.
  // False if the time was up first.  Does not wait in the reactor's thread.
  virtual bool flush(Nanos longest) = 0;
};

}  // namespace ringreduce::net
