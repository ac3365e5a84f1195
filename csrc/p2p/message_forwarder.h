// Messages between ranks that share no memory: the byte rings of transport/shm/channel.h, carried
// by sockets.
//
// A rank writes parts into a ring of its own memory as if it were the receiver's.  The forwarder,
// in the reactor's thread, sends the bytes of that ring, and puts arriving bytes into a ring that
// the rank reads.  A connection is one-way.  The sender makes it when it first has something to
// send: parts, or the count of eager bytes that have arrived.  Nothing is ever sent back on it,
// so closing it loses nothing that is in flight.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "p2p/message_connection.h"
#include "transport/tcp/connector.h"
#include "transport/tcp/reactor.h"
#include "transport/tcp/socket.h"

namespace ringreduce::net {

class MessageForwarder {
 public:
  // Called in the reactor's thread.
  struct Listener {
    virtual ~Listener() = default;
    // Something arrived from that rank, or there is room for more to it.
    virtual void onProgress(int rank) = 0;
    // Sending to that rank, or receiving from it, has ended.  Once for each direction.  `damaged`:
    // it sent invalid bytes, so nothing else will explain the end.
    virtual void broken(int rank, const std::string& how, bool damaged) = 0;
  };
  // `dial` is called in a thread of the forwarder.
  static std::unique_ptr<MessageForwarder> start(std::shared_ptr<Reactor> reactor, int rank,
                                                 int size, Dial dial, Listener& listener);
  ~MessageForwarder();  // after it, the listener is not called

  // The memory belongs to the forwarder.
  ChannelEnds ends(int rank) const;
  // Whether a connection from that rank is open, so that bytes may still arrive.  In the reactor's
  // thread; already false when `broken` reports the end.
  bool mayReceiveFrom(int rank) const;
  // Takes a connection that another rank has made.  From any thread; in the reactor's thread it
  // takes effect at once.
  void accept(int from, Socket socket);
  // The engine has written, read or consumed.  From any thread; cheap if nothing is to be done.
  void wake(int rank);
  // The ranks for which written bytes wait, without those that cannot be sent to.  From any thread.
  std::vector<int> unsent();
  // Waits, at most `longest`, until the other ranks' systems have all written bytes, without ranks
  // that cannot be sent to.  False on timeout.  Does not wait in the reactor's thread.
  bool flush(Nanos longest);

 private:
  class Carrier;
  MessageForwarder(std::shared_ptr<Reactor> reactor, std::shared_ptr<Carrier> carrier);

  const std::shared_ptr<Reactor> reactor_;
  const std::shared_ptr<Carrier> carrier_;
};

}  // namespace ringreduce::net
