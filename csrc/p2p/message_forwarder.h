// Messages between ranks that share no memory: the byte rings of transport/shm/channel.h, carried
// by sockets.
//
// A rank writes records into a ring of its own memory as if it were the receiver's.  The forwarder,
// in the reactor's thread, sends the bytes of that ring, and puts arriving bytes into a ring that
// the rank reads.  A connection is one-way.  The sender makes it when it first has something to
// send: records, or the count of eager bytes that have arrived.  Nothing is ever sent back on it,
// so closing it loses nothing that is in flight.
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

class MessageForwarder {
 public:
  // The ends of the channels to and from one rank, for p2p/engine.h.
  struct Ends {
    std::byte* out_ring;  // records to that rank
    Flag* out_filled;     // bytes that the engine has written
    Flag* out_emptied;    // bytes that the forwarder has sent
    std::byte* in_ring;   // records from that rank
    Flag* in_filled;      // bytes that the forwarder has received
    Flag* in_emptied;     // bytes that the engine has read
    Flag* consumed;       // eager bytes from that rank that the engine has taken
    Flag* acknowledged;   // that rank's `consumed`, as last received
  };
  // Called in the reactor's thread.
  struct Listener {
    virtual ~Listener() = default;
    // Something arrived from that rank, or there is room for more to it.
    virtual void stirred(int rank) = 0;
    // Sending to that rank, or receiving from it, has ended.  Once for each direction.  `damaged`:
    // it sent invalid bytes, so nothing else will explain the end.
    virtual void broken(int rank, const std::string& how, bool damaged) = 0;
  };
  // `dial` is called in a thread of the forwarder.
  static std::unique_ptr<MessageForwarder> start(std::shared_ptr<Reactor> reactor, int rank,
                                                 int size, Dial dial, Listener& listener);
  virtual ~MessageForwarder() = default;  // after it, the listener is not called

  // The memory belongs to the forwarder.
  virtual Ends ends(int rank) = 0;
  // Whether a connection from that rank is open, so that bytes may still arrive.  In the reactor's
  // thread; already false when `broken` reports the end.
  virtual bool hears(int rank) = 0;
  // Takes a connection that another rank has made.  From any thread; in the reactor's thread it
  // takes effect at once.
  virtual void accept(int from, Socket socket) = 0;
  // The engine has written, read or consumed.  From any thread; cheap if nothing is to be done.
  virtual void stir(int rank) = 0;
  // The ranks for which written bytes wait, without those that cannot be sent to.  From any thread.
  virtual std::vector<int> unsent() = 0;
  // Waits, at most `longest`, until the other ranks' systems have all written bytes, without ranks
  // that cannot be sent to.  False on timeout.  Does not wait in the reactor's thread.
  virtual bool flush(Nanos longest) = 0;
};

}  // namespace ringreduce::net
