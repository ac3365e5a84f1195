// Where a rank can be reached: addresses of this machine's interfaces, and which of them to use.
//
// RINGREDUCE_IF says which interfaces, as a list separated by commas: names ("eth0", or "eth*"),
// networks or addresses ("10.0.0.0/8", "fd00::/8", "10.0.0.3"), and any with a ^ before it for
// those that are not to be used ("^lo,^docker0").  What stands first is tried first.  Unset: the
// interface by which the store's host is reached; if that is loopback, the others.  Loopback, which
// no other host can reach, is never used beside others: only if the list leaves nothing else, or if
// nothing else is up.
//
// Link-local addresses (fe80::/10, 169.254.0.0/16) are used only if a network or an address of the
// list names them, or if there are no others: the IPv6 ones name an interface, which may be called
// otherwise elsewhere.  RINGREDUCE_PORTS=47000-47100 bounds the ports.
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
  // "10.0.0.3:4711", "[fd00::3]:4711", "[fe80::1%eth0]:4711"; nullopt if it is none, or names an
  // interface that is not here.  IPv4 written as IPv6 (::ffff:10.0.0.3) is IPv4.
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
  bool sameHost(const Address& other) const;  // equal but for the port
  // Whether the first `bits` bits are equal; never for another family.
  bool sameNetwork(const Address& other, int bits) const;
  int bits() const { return family() == AF_INET ? 32 : 128; }

 private:
  sockaddr_storage storage_{};
  socklen_t length_ = 0;
};

struct Interface {
  std::string name;
  Address address;  // port 0
  int prefix = 0;   // bits of its network
  bool up = false;  // and has a carrier
  bool loopback = false;
};
std::vector<Interface> interfaces();  // one for each address

// The addresses to be reached at, best first, of those of `all`; `wanted` as RINGREDUCE_IF has it.
// `towards` is this machine's address on the way to the store's host, if that is known.  Throws
// Error(kSetup), which names the interfaces that there are, if none is left.  At most
// kMostAddresses.
inline constexpr size_t kMostAddresses = 8;
std::vector<Address> choose(const std::vector<Interface>& all, const std::string& wanted,
                            const std::optional<Address>& towards);

// This machine's address on the way to a host, by its name or number; nullopt if there is no way.
// Blocks as long as the system's resolver does.
std::optional<Address> addressTowards(const std::string& host);

// This machine's address on the way to the rest of the world, where there is a way (nothing is
// sent).
std::optional<Address> addressTowardsOthers();

// A range of ports, "47000-47100" or "47000"; throws Error(kSetup) for what is none.
struct Ports {
  uint16_t first = 0, last = 0;  // 0: any
  static Ports fromText(const std::string& text);
};

// Non-blocking, close-on-exec, listening sockets, all on the same port: one for each address, and
// no other, so that an interface that was not chosen is not listened on.  Throws Error(kSetup) if
// all ports of the range are taken.
struct Listener {
  std::vector<Fd> sockets;
  std::vector<Address> addresses;  // with the port, in the same order; those that could be bound
  uint16_t port = 0;
};
Listener listenOn(const std::vector<Address>& addresses, Ports ports);

}  // namespace ringreduce::net
