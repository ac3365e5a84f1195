// Connections between processes: this process's port, and connecting to another's.
//
// A process listens on one port for all its groups.  A connection has a few seconds to prove that
// it knows the secret of a group; until then it is pending.  The number of pending connections is
// bounded: beyond that the oldest is closed, those first that have not named a group of this
// process. A refused connection gets no reason; refusals are logged once a minute, with a count.
//
// Ranks learn at different times that they are in a group, so a rank may be dialled before it has
// been admitted here.  Such a connection is held until the rank is admitted or the handshake times
// out.  A dialling rank that is closed before it got an answer tries again until its own deadline.
// So neither a slow process nor a flood of strangers keeps a rank out for good.
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

// The addresses of a rank, as text for the group's table: "10.0.0.3:4711 [fd00::3]:4711".
struct Endpoint {
  std::vector<Address> addresses;  // best first, without duplicates
  std::string text() const;
  // Throws Error(kSetup).  Skips link-local addresses of an interface that this host lacks.
  static Endpoint fromText(const std::string& text);
};

class Acceptor {
 public:
  // Takes an authenticated connection: non-blocking, TCP_NODELAY.  Called in the reactor's thread,
  // once for each.
  using Taken = std::function<void(Socket socket, const PeerHello& caller)>;

  // This process's acceptor; created, with its port, if there is none.  `store_host`: name or
  // address of the store's host, or "".  Throws Error(kSetup).
  static std::shared_ptr<Acceptor> shared(const std::string& store_host);
  virtual ~Acceptor() = default;

  virtual const Endpoint& endpoint() const = 0;
  // The endpoint and why it was chosen: "eth0 (10.0.0.3:4711), as RINGREDUCE_IF=eth0 has it".
  virtual const std::string& choice() const = 0;
  // Admits connections to rank `to` of this group until the returned token is destroyed.  After
  // that `taken` does not run and is not called again, unless `taken` itself destroys the token. Do
  // not destroy the token while you hold a lock that `taken` needs.  `encrypted`: must be the same
  // at the other end (transport/tcp/tls.h).
  virtual std::shared_ptr<void> admit(const std::string& group, int to, const Secret& secret,
                                      Taken taken, bool encrypted = false) = 0;
};

struct DialOptions {
  Nanos timeout = 30 * kSecond;   // for all addresses and the handshake together
  Nanos deaf = kNever;            // until the first address accepts a connection
  std::string congestion;         // RINGREDUCE_CONGESTION: "bbr", "cubic"; "": the kernel's default
  size_t address = 0;             // the index (modulo their number) to try first
  void (*turn)(void*) = nullptr;  // called every few milliseconds; throws to give up
  void* context = nullptr;
};
// Connects to a rank.  Tries its addresses in turn, each for a share of the time, again and again;
// not those that refuse, have no route, or answer as another program.  The kernel of a stopped
// process accepts connections although the process does not answer.  To wait for it without a
// limit, set no `timeout` but `deaf`, which still detects a firewall.  The connection is
// non-blocking, has TCP_NODELAY, is authenticated, and encrypted if `self` says so; nothing beyond
// the handshake has been read.  Throws Error(kSetup) "cannot reach rank 3 at 10.0.0.3:4711:
// connection refused; ...", with what to check (a firewall, RINGREDUCE_IF).  `who` names the other
// rank in it.
Socket dial(const Endpoint& endpoint, const PeerHello& self, const Secret& secret,
            const DialOptions& options, const std::string& who);

// Throws Error(kSetup), as dial would, if this process cannot use that congestion control.
void checkCongestion(const std::string& name);

}  // namespace ringreduce::net
