// The addresses of this machine's interfaces, and the choice among them.
//
// RINGREDUCE_IF is a list of interfaces separated by commas: names ("eth0", or "eth*"), networks or
// addresses ("10.0.0.0/8", "fd00::/8", "10.0.0.3"); a ^ before an entry excludes it
// ("^lo,^docker0").  The first is tried first.  Unset: the interface that leads to the store's
// host; if that is loopback, all others.  Loopback is used only if nothing else is chosen or up.
//
// Link-local addresses (fe80::/10, 169.254.0.0/16) are used only if a network or an address of the
// list names them, or if there are no others: an IPv6 one contains the name of an interface, which
// may differ on another host.  RINGREDUCE_PORTS=47000-47100 bounds the ports.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/fd.h"

namespace ringreduce::net {

// An IPv4 or IPv6 address and a port.
class Address {
 public:
  Address() = default;
  Address(const sockaddr* address, socklen_t length);
  // "10.0.0.3:4711", "[fd00::3]:4711", "[fe80::1%eth0]:4711"; nullopt if it is invalid or
  // names an interface that this host lacks.  IPv4 written as IPv6 (::ffff:10.0.0.3) is IPv4.
  static std::optional<Address> parse(const std::string& text);
  // Without a port: "10.0.0.3", "fd00::3".
  static std::optional<Address> parseHost(const std::string& text);
  std::string text() const;
  std::string hostText() const;  // without the port

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t length() const { return length_; }
  int family() const { return storage_.ss_family; }
  uint16_t port() const;
  Address withPort(uint16_t port) const;
  bool isLoopback() const;
  bool isLinkLocal() const;
  bool sameHost(const Address& other) const;  // ignores the port
  // Whether the first `bits` bits are equal; never for another family.
  bool sameNetwork(const Address& other, int bits) const;
  int bits() const { return family() == AF_INET ? 32 : 128; }

 private:
  sockaddr_storage storage_{};
  socklen_t length_ = 0;
};

// The two ends of a socket, if they are known.
std::optional<Address> localAddress(const Fd& socket);
std::optional<Address> peerAddress(const Fd& socket);

struct Interface {
  std::string name;
  Address address;  // port 0
  int prefix = 0;   // bits of its network
  bool up = false;  // and has a carrier
  bool loopback = false;
};
std::vector<Interface> interfaces();  // one for each address

// Chooses from `all`, best first, at most kMostAddresses.  `wanted`: the value of RINGREDUCE_IF.
// `towards`: this machine's address on the route to the store's host, if known.  Throws
// Error(kSetup), with the interfaces of this machine, if none is left.
inline constexpr size_t kMostAddresses = 8;
std::vector<Address> choose(const std::vector<Interface>& all, const std::string& wanted,
                            const std::optional<Address>& towards);

// This machine's address on the route to a host, given by name or address; nullopt without a route.
// May block in the resolver.
std::optional<Address> addressTowards(const std::string& host);

// This machine's address on the default route, if there is one.  Sends nothing.
std::optional<Address> addressTowardsOthers();

// The choice for a process whose store is on that host, given by name or address; "" if unknown.
// May block in the resolver.
struct Choice {
  std::vector<Interface> all;      // of this machine
  std::vector<Address> addresses;  // as of choose()
  std::string why;                 // goes on after "eth0 (10.0.0.3), "

  std::string nameOf(const Address& address) const;  // of its interface
};
Choice chooseFor(const std::string& store_host, const std::string& wanted);

// A range of ports, "47000-47100" or "47000"; throws Error(kSetup) if invalid.
struct Ports {
  uint16_t first = 0, last = 0;  // 0: any
  static Ports fromText(const std::string& text);
};

// Non-blocking, close-on-exec, listening sockets on one port: one for each chosen address.  Throws
// Error(kSetup) if all ports of the range are taken.
struct Listener {
  std::vector<Fd> sockets;
  std::vector<Address> addresses;  // with the port, in the same order; those that could be bound
  uint16_t port = 0;
};
Listener listenOn(const std::vector<Address>& addresses, Ports ports);

}  // namespace ringreduce::net
