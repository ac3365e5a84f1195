// Connections between processes: the port of this one, and how to reach another's.
//
// A process listens on one port for all its groups.  Whoever connects has a few seconds to prove
// that it knows the secret of one of them; until then it costs a descriptor and a few hundred
// bytes, and there are no more of its kind than a bound: beyond that the oldest is dropped, those
// first that have not named a group of this process.  What is refused is told nothing, and is
// logged once a minute, with a count.
//
// Ranks hear that they are in a group at different times, so one may be called before it has been
// admitted here.  Its caller is not refused but held until it is admitted, or the time for
// handshakes is over.  Whoever dials and is dropped before it was answered tries again, until its
// own time is over: so neither a slow process nor a flood of strangers keeps a rank out for good.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "transport/tcp/address.h"
#include "transport/tcp/handshake.h"
#include "transport/tcp/socket.h"

namespace ringreduce::net {

// Where a rank can be reached, as text for the group's table: "10.0.0.3:4711 [fd00::3]:4711".
struct Endpoint {
  std::vector<Address> addresses;  // best first, none twice
  std::string text() const;
  // Throws Error(kSetup).  Leaves out link-local addresses by an interface that is not here.
  static Endpoint fromText(const std::string& text);
};

class Acceptor {
 public:
  // Takes over a connection that was proven: non-blocking, TCP_NODELAY.  Called in the reactor's
  // thread, once for each.
  using Taken = std::function<void(Socket socket, const PeerHello& caller)>;

  // This process's; made, with its port, if there is none.  `store_host`: the host of the store, by
  // name or number, or "".  Throws Error(kSetup).
  static std::shared_ptr<Acceptor> shared(const std::string& store_host);
  virtual ~Acceptor() = default;

  virtual const Endpoint& endpoint() const = 0;
  // Where that is and how it was chosen, in words: "eth0 (10.0.0.3:4711), as RINGREDUCE_IF=eth0 has
  // it".
  virtual const std::string& choice() const = 0;
  // Lets in callers to rank `to` of this group until the returned token is destroyed: then `taken`
  // is not running and will not be called again, unless it is itself what destroys it.  The token
  // must not be destroyed with a lock held that `taken` wants.  `encrypted`: only those in that say
  // the same of themselves (transport/tcp/tls.h).
  virtual std::shared_ptr<void> admit(const std::string& group, int to, const Secret& secret,
                                      Taken taken, bool encrypted = false) = 0;
};

struct DialOptions {
  Nanos timeout = 30 * kSecond;   // of all addresses and the handshake together; kNever: none
  Nanos deaf = kNever;            // the same until a first address takes a connection
  std::string congestion;         // RINGREDUCE_CONGESTION: "bbr", "cubic"; "": the system's default
  size_t address = 0;             // which of the endpoint's (modulo their number) to try first
  void (*turn)(void*) = nullptr;  // called every few milliseconds; throws to give up
  void* context = nullptr;
};
// Connects to a rank: tries its addresses in turn, each for a share of the time and again after the
// others, but not those that refuse, that no way leads to, or where somebody else answers.  A
// process that is stopped lets its system take connections and says nothing: whoever wants to wait
// for it as long as it takes gives no time but `deaf`, by which a firewall still shows.
// Non-blocking, TCP_NODELAY, proven, encrypted if `self` says so; nothing beyond the handshake has
// been read.  Throws
// Error(kSetup) "cannot reach rank 3 at 10.0.0.3:4711: connection refused; ...", which names what
// to look at (a firewall, RINGREDUCE_IF); `who` is the name of the other in it.
Socket dial(const Endpoint& endpoint, const PeerHello& self, const Secret& secret,
            const DialOptions& options, const std::string& who);

// Throws Error(kSetup), as dial would, where this process cannot have that congestion control;
// there is always "".
void checkCongestion(const std::string& name);

}  // namespace ringreduce::net
