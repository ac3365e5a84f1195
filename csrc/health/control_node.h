// A rank in the control ring: its connections, what it makes of what comes over them, and how it
// closes gaps.  What control.h promises is kept here; all of it runs in the reactor's thread.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "health/control.h"
#include "health/control_frames.h"
#include "health/control_ring.h"
#include "health/control_state.h"

namespace ringreduce::net {

class ControlNode : public std::enable_shared_from_this<ControlNode> {
 public:
  ControlNode(std::shared_ptr<Reactor> reactor, int rank, int size, Dial dial,
              Control::Listener& listener, const Control::Options& options)
      : reactor_(std::move(reactor)),
        me_(rank),
        options_(options),
        listener_(listener),
        ring_(size, options.ring),
        state_(size),
        dialler_(std::move(dial), options.lost_after) {}

  void begin(Socket next, Socket previous);
  void end();
  bool isOver() const { return over_; }
  void stopDialling() { dialler_.stop(); }
  void add(int peer, Socket socket, bool proven, bool dialled);
  void tell(const Verdict& verdict);
  void depart(Departure how);
  void ask(uint64_t since);
  bool isFlushed();

 private:
  struct Connection {
    Connection(int p, Socket s, int size) : peer(p), socket(std::move(s)), in(size) {}
    const int peer;
    Socket socket;
    ControlReader in;
    Outbox outbox;         // what is new to it
    std::string out;       // bytes on their way
    bool proven = false;   // it has carried something: its end means something
    bool dialled = false;  // by this rank, to close a gap
    bool writable = true, needed = true, told_not_needed = false;
    int unheard = 0;                   // heartbeats sent since something came
    int error = 0;                     // of writing
    uint64_t sent = 0, last_news = 0;  // bytes written, and those up to what was told last
  };
  using Link = std::shared_ptr<Connection>;

  template <class F>
  auto later(F&& f) {
    return [self = weak_from_this(), f = std::forward<F>(f)](auto&&... rest) mutable {
      if (const auto ring = self.lock(); ring && !ring->over_) f(*ring, rest...);
    };
  }

  // connections
  void ready(const Link& link, uint32_t events);
  void receive(const Link& link);
  void goOn(const Link& link);
  void send(Connection& link);
  void sendAll();
  void lose(const Link& link, int error, bool nonsense);
  void beat();
  bool isLinked(int rank) const;
  // what comes
  void take(const Link& link, const ControlFrame& frame);
  void takeBroken(const Broken& broken, Connection* from);
  void takeAnswer(const Answer& answer, Connection* from);
  void answer(uint64_t since);
  bool isNews(const Whereabouts& own) const;
  void spread(Outbox::Item item, const Connection* from);
  // what follows from it
  void mend();
  void dialNext();
  void notReached(int rank);
  void judge();
  void tellLost(std::vector<int> ranks, PeerState fate, const std::string& how);
  bool listens() const { return !state_.verdict && state_.departure(me_) != Departure::kGone; }
  std::string noPacket(size_t ranks) const;

  const std::shared_ptr<Reactor> reactor_;
  const int me_;
  const Control::Options options_;
  Control::Listener& listener_;
  ControlRing ring_;
  ControlState state_;
  std::vector<Link> links_;
  bool over_ = false;

  Reactor::Timer heart_ = 0, settling_ = 0, again_ = 0;
  Nanos next_question_ = 0, next_answer_ = 0;
  ControlRing::Cuts cuts_;
  std::set<int> told_lost_;
  bool dialling_ = false;
  std::set<int> not_reached_;  // of those to whom a gap could not be closed
  std::map<int, Nanos> silent_since_;
  Dialler dialler_;
};

}  // namespace ringreduce::net
