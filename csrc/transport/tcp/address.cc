// Addresses as text and as the system has them; this machine's interfaces, and ways out of it.
#include "transport/tcp/address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string_view>

#include "base/error.h"

namespace ringreduce::net {
namespace {

const sockaddr_in& four(const sockaddr* address) {
  return *reinterpret_cast<const sockaddr_in*>(address);
}
const sockaddr_in6& six(const sockaddr* address) {
  return *reinterpret_cast<const sockaddr_in6*>(address);
}

// The bytes of the address alone.
std::string_view bytesOf(const Address& address) {
  if (address.family() == AF_INET)
    return {reinterpret_cast<const char*>(&four(address.get()).sin_addr), 4};
  if (address.family() == AF_INET6)
    return {reinterpret_cast<const char*>(&six(address.get()).sin6_addr), 16};
  return {};
}

// A whole number of digits only, from 0 to `most`; nullopt if it is none.
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

// This machine's address on the way there.  A datagram socket sends nothing by being connected.
std::optional<Address> onTheWayTo(const sockaddr* there, socklen_t length) {
  Fd fd(socket(there->sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd || connect(fd.get(), there, length) != 0) return std::nullopt;
  sockaddr_storage here{};
  socklen_t size = sizeof here;
  if (getsockname(fd.get(), reinterpret_cast<sockaddr*>(&here), &size) != 0) return std::nullopt;
  return Address(reinterpret_cast<sockaddr*>(&here), size).withPort(0);
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
  if (text.size() != std::strlen(text.c_str())) return std::nullopt;  // a zero within
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
      sockaddr_storage mask{};  // some systems leave its family out
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
  // Addresses kept for documentation: nobody has them, so the way to them is the way to all.
  for (const char* other : {"203.0.113.1:9", "[2001:db8::1]:9"}) {
    const auto there = Address::parse(other);
    if (auto address = onTheWayTo(there->get(), there->length())) return address;
  }
  return std::nullopt;
}

}  // namespace ringreduce::net
