// Addresses, the choice of interfaces, and listening sockets.
#include "transport/tcp/address.h"

#include <arpa/inet.h>
#include <fnmatch.h>
#include <ifaddrs.h>
#include <linux/tcp.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "base/error.h"
#include "base/text.h"

namespace ringreduce::net {

// ---- addresses

namespace {

const sockaddr_in& four(const sockaddr* address) {
  return *reinterpret_cast<const sockaddr_in*>(address);
}
const sockaddr_in6& six(const sockaddr* address) {
  return *reinterpret_cast<const sockaddr_in6*>(address);
}

// The bytes of the address without port and scope.
std::string_view bytesOf(const Address& address) {
  if (address.family() == AF_INET)
    return {reinterpret_cast<const char*>(&four(address.get()).sin_addr), 4};
  if (address.family() == AF_INET6)
    return {reinterpret_cast<const char*>(&six(address.get()).sin6_addr), 16};
  return {};
}

// A number from 0 to `most` of digits only; nullopt otherwise.
std::optional<uint32_t> number(std::string_view text, uint32_t most) {
  if (text.empty() || text.size() > 10) return std::nullopt;
  uint64_t value = 0;
  for (char c : text) {
    if (c < '0' || c > '9') return std::nullopt;
    value = value * 10 + static_cast<uint64_t>(c - '0');
  }
  if (value > most) return std::nullopt;
  return static_cast<uint32_t>(value);
}

std::optional<Address> parseFour(const std::string& text) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  if (inet_pton(AF_INET, text.c_str(), &address.sin_addr) != 1) return std::nullopt;
  return Address(reinterpret_cast<sockaddr*>(&address), sizeof address);
}

std::optional<Address> parseSix(std::string text) {
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  if (const size_t percent = text.find('%'); percent != std::string::npos) {
    const std::string scope = text.substr(percent + 1);
    address.sin6_scope_id = if_nametoindex(scope.c_str());
    if (address.sin6_scope_id == 0) address.sin6_scope_id = number(scope, UINT32_MAX).value_or(0);
    if (address.sin6_scope_id == 0) return std::nullopt;
    text.resize(percent);
  }
  if (inet_pton(AF_INET6, text.c_str(), &address.sin6_addr) != 1) return std::nullopt;
  return Address(reinterpret_cast<sockaddr*>(&address), sizeof address);
}

std::optional<Address> nameOf(const Fd& socket, int (*name)(int, sockaddr*, socklen_t*)) {
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  auto* address = reinterpret_cast<sockaddr*>(&storage);
  if (name(socket.get(), address, &size) != 0) return std::nullopt;
  return Address(address, size);
}

// This machine's address on the route there.  Connecting a datagram socket sends nothing.
std::optional<Address> onTheWayTo(const sockaddr* there, socklen_t length) {
  Fd fd(socket(there->sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd || connect(fd.get(), there, length) != 0) return std::nullopt;
  const std::optional<Address> here = localAddress(fd);
  return here ? std::optional(here->withPort(0)) : std::nullopt;
}

}  // namespace

Address::Address(const sockaddr* address, socklen_t length)
    : length_(std::min<socklen_t>(length, sizeof storage_)) {
  std::memcpy(&storage_, address, length_);
  if (family() != AF_INET6 || !IN6_IS_ADDR_V4MAPPED(&six(get()).sin6_addr)) return;
  sockaddr_in plain{};
  plain.sin_family = AF_INET;
  plain.sin_port = six(get()).sin6_port;
  std::memcpy(&plain.sin_addr, six(get()).sin6_addr.s6_addr + 12, 4);
  storage_ = {};
  length_ = sizeof plain;
  std::memcpy(&storage_, &plain, length_);
}

std::optional<Address> Address::parseHost(const std::string& text) {
  if (text.size() != std::strlen(text.c_str())) return std::nullopt;  // it contains a zero
  return text.find(':') == std::string::npos ? parseFour(text) : parseSix(text);
}

std::optional<Address> Address::parse(const std::string& text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos || colon == 0) return std::nullopt;
  const auto port = number(std::string_view(text).substr(colon + 1), UINT16_MAX);
  const bool bracketed = text[0] == '[' && text[colon - 1] == ']' && colon >= 2;
  const std::string host = bracketed ? text.substr(1, colon - 2) : text.substr(0, colon);
  if (!port || bracketed != (host.find(':') != std::string::npos)) return std::nullopt;
  const auto address = parseHost(host);
  if (!address) return std::nullopt;
  return address->withPort(static_cast<uint16_t>(*port));
}

std::string Address::hostText() const {
  char text[INET6_ADDRSTRLEN] = {};
  if (family() == AF_INET) {
    inet_ntop(AF_INET, &four(get()).sin_addr, text, sizeof text);
    return text;
  }
  if (family() != AF_INET6) return "no address";
  inet_ntop(AF_INET6, &six(get()).sin6_addr, text, sizeof text);
  const uint32_t scope = six(get()).sin6_scope_id;
  if (scope == 0) return text;
  char name[IF_NAMESIZE] = {};
  return std::string(text) + '%' + (if_indextoname(scope, name) ? name : std::to_string(scope));
}

std::string Address::text() const {
  const bool six = family() == AF_INET6;
  std::string text(six, '[');
  text += hostText();
  if (six) text += ']';
  text += ':';
  text += std::to_string(port());
  return text;
}

uint16_t Address::port() const {
  if (family() == AF_INET) return ntohs(four(get()).sin_port);
  return family() == AF_INET6 ? ntohs(six(get()).sin6_port) : uint16_t{0};
}

Address Address::withPort(uint16_t port) const {
  Address other = *this;
  if (family() == AF_INET) reinterpret_cast<sockaddr_in*>(&other.storage_)->sin_port = htons(port);
  if (family() == AF_INET6)
    reinterpret_cast<sockaddr_in6*>(&other.storage_)->sin6_port = htons(port);
  return other;
}

bool Address::isLoopback() const {
  if (family() == AF_INET6) return IN6_IS_ADDR_LOOPBACK(&six(get()).sin6_addr);
  return family() == AF_INET && bytesOf(*this)[0] == 127;
}

bool Address::isLinkLocal() const {
  if (family() == AF_INET6) return IN6_IS_ADDR_LINKLOCAL(&six(get()).sin6_addr);
  const std::string_view bytes = bytesOf(*this);
  return family() == AF_INET && bytes[0] == static_cast<char>(169) &&
         bytes[1] == static_cast<char>(254);
}

bool Address::sameHost(const Address& other) const {
  if (family() == AF_INET6 && other.family() == AF_INET6 &&
      six(get()).sin6_scope_id != six(other.get()).sin6_scope_id)
    return false;
  return sameNetwork(other, bits());
}

bool Address::sameNetwork(const Address& other, int bits) const {
  if (family() != other.family()) return false;
  const std::string_view a = bytesOf(*this), b = bytesOf(other);
  const auto whole = static_cast<size_t>(bits / 8);
  if (a.substr(0, whole) != b.substr(0, whole)) return false;
  if (bits % 8 == 0) return true;
  return (static_cast<unsigned char>(a[whole]) ^ static_cast<unsigned char>(b[whole])) >>
             (8 - bits % 8) ==
         0;
}

std::optional<Address> localAddress(const Fd& socket) {
  return nameOf(socket, getsockname);
}

std::optional<Address> peerAddress(const Fd& socket) {
  return nameOf(socket, getpeername);
}

std::vector<Interface> interfaces() {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0)
    throwErrno(Failure::kSetup, "cannot ask for this host's network interfaces");
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> list(first, freeifaddrs);
  std::vector<Interface> all;
  for (const ifaddrs* entry = first; entry; entry = entry->ifa_next) {
    if (!entry->ifa_addr) continue;
    const int family = entry->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    const socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    Interface one;
    one.name = entry->ifa_name;
    one.address = Address(entry->ifa_addr, length).withPort(0);
    one.prefix = one.address.bits();
    if (entry->ifa_netmask) {
      sockaddr_storage mask{};  // some systems leave out its family
      std::memcpy(&mask, entry->ifa_netmask, length);
      mask.ss_family = static_cast<sa_family_t>(family);
      const Address bits(reinterpret_cast<sockaddr*>(&mask), length);
      one.prefix = 0;
      for (char byte : bytesOf(bits))
        one.prefix += __builtin_popcount(static_cast<unsigned char>(byte));
    }
    one.up = (entry->ifa_flags & IFF_UP) && (entry->ifa_flags & IFF_RUNNING);
    one.loopback = (entry->ifa_flags & IFF_LOOPBACK) != 0;
    all.push_back(std::move(one));
  }
  return all;
}

std::optional<Address> addressTowards(const std::string& host) {
  if (host.empty()) return std::nullopt;
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  const std::string name = bracketed ? host.substr(1, host.size() - 2) : host;
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* first = nullptr;
  if (getaddrinfo(name.c_str(), "9", &hints, &first) != 0) return std::nullopt;
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> list(first, freeaddrinfo);
  for (const addrinfo* entry = first; entry; entry = entry->ai_next)
    if (auto address = onTheWayTo(entry->ai_addr, entry->ai_addrlen)) return address;
  return std::nullopt;
}

std::optional<Address> addressTowardsOthers() {
  // Addresses reserved for documentation: no host has them, so they follow the default route.
  for (const char* other : {"203.0.113.1:9", "[2001:db8::1]:9"}) {
    const auto there = Address::parse(other);
    if (auto address = onTheWayTo(there->get(), there->length())) return address;
  }
  return std::nullopt;
}

// ---- the choice of interfaces

namespace {

// An entry of RINGREDUCE_IF: an interface by name, or a network.
struct Term {
  bool excludes = false;
  std::string name;                // may contain * and ?
  std::optional<Address> network;  // if it is not a name
  int prefix = 0;

  bool fits(const Interface& interface) const {
    if (!network) return fnmatch(name.c_str(), interface.name.c_str(), 0) == 0;
    return network->sameNetwork(interface.address, prefix);
  }
};

[[noreturn]] void refuse(const std::string& wanted, const std::string& item) {
  throw Error(Failure::kSetup,
              "RINGREDUCE_IF=" + wanted + ": '" + item +
                  "' is neither an interface's name, nor a network such as 10.0.0.0/8 or "
                  "fd00::/8; correct or unset it");
}

Term termOf(const std::string& item, const std::string& wanted) {
  Term term;
  term.excludes = item[0] == '^';
  const std::string text = item.substr(term.excludes ? 1 : 0);
  const size_t slash = text.find('/');
  term.network = Address::parseHost(text.substr(0, slash));
  if (term.network) term.prefix = term.network->bits();
  if (slash != std::string::npos) {
    const std::string bits = text.substr(slash + 1);
    const bool digits = !bits.empty() && bits.size() <= 3 &&
                        bits.find_first_not_of("0123456789") == std::string::npos;
    if (!term.network || !digits || std::atoi(bits.c_str()) > term.prefix) refuse(wanted, item);
    term.prefix = std::atoi(bits.c_str());
  } else if (!term.network) {
    if (text.empty() || text.find_first_of(" :^") != std::string::npos) refuse(wanted, item);
    term.name = text;
  }
  return term;
}

std::vector<Term> termsOf(const std::string& wanted) {
  std::vector<Term> terms;
  TextReader items(wanted);
  for (std::string item; std::getline(items, item, ',');) {
    item.erase(0, item.find_first_not_of(" \t"));
    item.erase(item.find_last_not_of(" \t") + 1);
    if (!item.empty()) terms.push_back(termOf(item, wanted));
  }
  if (terms.empty() && !wanted.empty()) refuse(wanted, wanted);  // only commas and blanks
  return terms;
}

// Bridges and pairs of container and virtual machine runtimes: other hosts often have one with the
// same address.
bool isOfThisHostOnly(const std::string& name) {
  static constexpr const char* kNames[] = {"docker*", "br-*",  "veth*",    "virbr*", "vnet*",
                                           "cni*",    "cali*", "flannel*", "lxc*",   "podman*"};
  return std::any_of(std::begin(kNames), std::end(kNames),
                     [&](const char* pattern) { return fnmatch(pattern, name.c_str(), 0) == 0; });
}

std::string listOf(const std::vector<Interface>& all) {
  if (all.empty()) return "no interface with an address";
  return joined(all, ", ", [](const Interface& one) {
    return one.name + " (" + one.address.hostText() + "/" + std::to_string(one.prefix) +
           (one.up ? ")" : ", down)");
  });
}

struct Candidate {
  const Interface* interface = nullptr;
  size_t term = 0;          // the first entry that matches
  bool by_network = false;  // that entry is a network or an address

  bool isLinkLocal() const { return interface->address.isLinkLocal() && !by_network; }
};

// Keeps only the better ones, if there are any.
template <class Better>
void prefer(std::vector<Candidate>& candidates, Better better) {
  if (std::ranges::any_of(candidates, better))
    std::erase_if(candidates, [&](const Candidate& one) { return !better(one); });
}

// Moves the better ones to the front, and keeps the order otherwise.
template <class Better>
void putFirst(std::vector<Candidate>& candidates, Better better) {
  std::ranges::stable_partition(candidates, better);
}

}  // namespace

std::vector<Address> choose(const std::vector<Interface>& all, const std::string& wanted,
                            const std::optional<Address>& towards) {
  const std::vector<Term> terms = termsOf(wanted);
  const auto includes = [](const Term& term) { return !term.excludes; };
  const bool named = std::ranges::any_of(terms, includes);

  std::vector<Candidate> candidates;
  bool only_loopback = true;
  std::string way;  // the interface that leads to the store's host
  for (const Interface& one : all) {
    if (!one.up) continue;
    only_loopback = only_loopback && one.loopback;
    if (towards && one.address.sameHost(*towards)) way = one.name;
    const auto fits = [&](bool excluding) {
      return std::ranges::find_if(
          terms, [&](const Term& term) { return term.excludes == excluding && term.fits(one); });
    };
    const auto term = fits(false);
    if (fits(true) != terms.end() || (named && term == terms.end())) continue;
    candidates.push_back({.interface = &one,
                          .term = static_cast<size_t>(term - terms.begin()),
                          .by_network = term != terms.end() && term->network.has_value()});
  }

  const auto isReal = [](const Candidate& one) { return !one.interface->loopback; };
  const auto isOnTheWay = [&](const Candidate& one) { return one.interface->name == way; };
  prefer(candidates, isReal);
  if (!named && !only_loopback) std::erase_if(candidates, std::not_fn(isReal));
  prefer(candidates, [](const Candidate& one) { return !one.isLinkLocal(); });
  if (!named) {
    prefer(candidates, isOnTheWay);
    prefer(candidates, [](const Candidate& one) { return !isOfThisHostOnly(one.interface->name); });
  }

  // Least important criterion first: each later sort has precedence.
  putFirst(candidates,
           [](const Candidate& one) { return one.interface->address.family() == AF_INET; });
  putFirst(candidates, [&](const Candidate& one) {
    return towards && one.interface->address.sameHost(*towards);
  });
  putFirst(candidates, isOnTheWay);
  std::ranges::stable_sort(candidates,
                           [](const Candidate& a, const Candidate& b) { return a.term < b.term; });

  std::vector<Address> chosen;
  for (const Candidate& one : candidates)
    if (chosen.size() < kMostAddresses && std::ranges::none_of(chosen, [&](const Address& other) {
          return other.sameHost(one.interface->address);
        }))
      chosen.push_back(one.interface->address);
  if (!chosen.empty()) return chosen;
  throw Error(Failure::kSetup,
              (terms.empty() ? "this host has no address to be reached at"
                             : "RINGREDUCE_IF=" + wanted + " leaves no address to be reached at") +
                  "; it has " + listOf(all) +
                  "; set RINGREDUCE_IF to the name or network of one that is up");
}

std::string Choice::nameOf(const Address& address) const {
  const auto its = std::ranges::find_if(
      all, [&](const Interface& one) { return one.address.sameHost(address); });
  return its == all.end() ? "an interface" : its->name;
}

Choice chooseFor(const std::string& store_host, const std::string& wanted) {
  const std::string store = store_host.empty() ? "the store" : "the store's host " + store_host;
  auto towards = addressTowards(store_host);
  Choice choice;
  choice.why = "by which " + store + " is reached";
  if (!towards || towards->isLoopback()) {
    choice.why = std::string("of the default route, since ") +
                 (towards ? store + " is reached by loopback" : "no way to " + store + " is known");
    towards = addressTowardsOthers();
    if (!towards) choice.why = "which is what there is, since there is no default route either";
  }
  if (!wanted.empty()) choice.why = "as RINGREDUCE_IF=" + wanted + " has it";
  choice.all = interfaces();
  choice.addresses = choose(choice.all, wanted, towards);
  return choice;
}

// ---- listening

namespace {

constexpr int kBacklog = 4096;   // net.core.somaxconn limits it
constexpr int kAnyTries = 1000;  // to find a port that is free at all addresses

// A socket that listens at this address; none, with errno, on failure.
Fd listenAt(const Address& address) {
  Fd fd(socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP));
  if (!fd) throwErrno(Failure::kSetup, "cannot make a socket");
  const int on = 1;
  // Allows a port whose last owner has just ended, but not one with a listener.
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (address.family() == AF_INET6) setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
  if (bind(fd.get(), address.get(), address.length()) != 0 || listen(fd.get(), kBacklog) != 0) {
    const int why = errno;
    fd.reset();
    errno = why;
  }
  return fd;
}

// Listens at all addresses on one port; nullopt if the port is taken at one of them.
std::optional<Listener> listenAtPort(const std::vector<Address>& addresses, uint16_t port) {
  Listener listener;
  listener.port = port;
  std::string gone;
  for (const Address& address : addresses) {
    Fd fd = listenAt(address.withPort(listener.port));
    if (!fd && errno == EADDRINUSE) return std::nullopt;
    if (!fd && (errno == EADDRNOTAVAIL || errno == EAFNOSUPPORT)) {
      // The address is being added or was removed: use the others.
      gone += ' ';
      gone += address.hostText();
      continue;
    }
    if (!fd)
      throwErrno(
          Failure::kSetup,
          "cannot listen at " + address.withPort(listener.port).text() +
              (errno == EACCES ? " (ports below 1024 need a privilege: RINGREDUCE_PORTS)" : ""));
    if (listener.port == 0) {
      const std::optional<Address> bound = localAddress(fd);
      if (!bound) throwErrno(Failure::kSetup, "cannot ask for a socket's port");
      listener.port = bound->port();
    }
    listener.addresses.push_back(address.withPort(listener.port));
    listener.sockets.push_back(std::move(fd));
  }
  if (listener.sockets.empty())
    throw Error(Failure::kSetup, "this host has no longer the address" + gone +
                                     " to listen at; look at its interfaces, and at RINGREDUCE_IF");
  return listener;
}

[[noreturn]] void refuse(const std::string& text) {
  throw Error(Failure::kSetup, "RINGREDUCE_PORTS=" + text +
                                   " is no range of ports, such as 47000-47100, or port, from 1 to "
                                   "65535; correct or unset it");
}

uint16_t portNamed(const std::string& text, const std::string& all) {
  if (text.empty() || text.size() > 5 || text.find_first_not_of("0123456789") != std::string::npos)
    refuse(all);
  const int port = std::stoi(text);
  if (port < 1 || port > UINT16_MAX) refuse(all);
  return static_cast<uint16_t>(port);
}

}  // namespace

Ports Ports::fromText(const std::string& text) {
  const size_t dash = text.find('-');
  Ports ports;
  ports.first = portNamed(text.substr(0, dash), text);
  ports.last = dash == std::string::npos ? ports.first : portNamed(text.substr(dash + 1), text);
  if (ports.first > ports.last) refuse(text);
  return ports;
}

Listener listenOn(const std::vector<Address>& addresses, Ports ports) {
  if (ports.first == 0) {
    for (int tries = 0; tries < kAnyTries; ++tries)
      if (auto listener = listenAtPort(addresses, 0)) return std::move(*listener);
    throw Error(Failure::kSetup,
                "no port is free at all of this host's chosen addresses; close "
                "what holds them, or choose one interface (RINGREDUCE_IF)");
  }
  for (int port = ports.first; port <= ports.last; ++port)
    if (auto listener = listenAtPort(addresses, static_cast<uint16_t>(port)))
      return std::move(*listener);
  throw Error(Failure::kSetup,
              "all ports from " + std::to_string(ports.first) + " to " +
                  std::to_string(ports.last) +
                  " are taken (RINGREDUCE_PORTS); each process needs one: widen the range");
}

}  // namespace ringreduce::net
