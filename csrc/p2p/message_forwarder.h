// Messages between ranks that share no memory: the byte rings of transport/shm/channel.h, carried
// by sockets.
//
// A rank writes records into a ring of its own memory as if it were the receiver's; the pump, in
// the reactor's thread, sends the bytes of the ring and puts those that come into a ring from which
// the rank reads.  Connections are one-way and made by the sender when it first has something to
// say: records, or that eager bytes have arrived.  Nothing ever comes back on one, so closing it
// takes nothing away that is still on its way.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "transport/shm/channel.h"
#include "transport/tcp/connector.h"
#include "transport/tcp/reactor.h"
#include "transport/tcp/socket.h"

namespace ringreduce::net {

class Pump {
 public:
  // The ends of the channels to and from one rank, as p2p/engine.h wants them.
  struct Ends {
    std::byte* out_ring;  // records to that rank
    Flag* out_filled;     // the engine's writer counts here what it wrote
    Flag* out_emptied;    // the pump counts here what it sent
    std::byte* in_ring;   // records from that rank
    Flag* in_filled;      // the pump counts here what came
    Flag* in_emptied;     // the engine's reader counts here what it read
    Flag* consumed;       // the engine counts here eager bytes of that rank's that have arrived
    Flag* acknowledged;   // the pump counts here what that rank has told of its `consumed`
  };
  struct Listener {
    virtual ~Listener() = default;
    // Something came from that rank, or there is room for more.  In the reactor's thread.
    virtual void stirred(int rank) = 0;
    // No more can be sent to that rank, or no more will come from it.  Once for each.  `damaged`:
    // what came cannot be what it sent, so there is nothing else to be heard of why.
    virtual void broken(int rank, const std::string& how, bool damaged) = 0;
  };
  // `dial` is called in a thread of the pump's.
  static std::unique_ptr<Pump> start(std::shared_ptr<Reactor> reactor, int rank, int size,
                                     Dial dial, Listener& listener);
  virtual ~Pump() = default;  // no listener is called once this has returned

  // Theirs is the pump's memory, and ends with it.
  virtual Ends ends(int rank) = 0;
  // Whether bytes may still come from that rank: a connection from it is open.  In the reactor's
  // thread; false by the time `broken` says that it has ended.
  virtual bool hears(int rank) = 0;
  // A connection that another rank has made.  From any thread; in the reactor's, it is heard at
  // once.
  virtual void accept(int from, Socket socket) = 0;
  // The engine has written, read or consumed: there may be something to carry.  From any thread,
  // cheap if there is not.
  virtual void stir(int rank) = 0;
  // The ranks to which something was written that their connections have not taken yet, but for
  // those to which nothing can be sent.  From any thread.
  virtual std::vector<int> unsent() = 0;
  // Waits, no longer than `longest`, until all that was written has reached the systems of the
  // others, but for those to which nothing can be sent.  False if the time was up first.  Does not
  // wait in the reactor's thread.
  virtual bool flush(Nanos longest) = 0;
};

}  // namespace ringreduce::net
