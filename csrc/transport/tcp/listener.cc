// Listening sockets, and the port that they share.
#include <linux/tcp.h>
#include <netinet/in.h>

#include <cerrno>
#include <string>

#include "base/error.h"
#include "transport/tcp/address.h"

namespace ringreduce::net {
namespace {

constexpr int kBacklog = 4096;   // as far as net.core.somaxconn goes
constexpr int kAnyTries = 1000;  // for a port that is free at all addresses

// A socket that listens at this address; none, with errno, if it cannot be had.
Fd listenAt(const Address& address) {
  Fd fd(socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP));
  if (!fd) throwErrno(Failure::kSetup, "cannot make a socket");
  const int on = 1;
  // A port of the range whose last owner has just ended; not one that is listened on.
  setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (address.family() == AF_INET6) setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
  if (bind(fd.get(), address.get(), address.length()) != 0 || listen(fd.get(), kBacklog) != 0) {
    const int why = errno;
    fd.reset();
    errno = why;
  }
  return fd;
}

uint16_t portOf(const Fd& fd) {
  sockaddr_storage name{};
  socklen_t size = sizeof name;
  if (getsockname(fd.get(), reinterpret_cast<sockaddr*>(&name), &size) != 0)
    throwErrno(Failure::kSetup, "cannot ask for a socket's port");
  return Address(reinterpret_cast<sockaddr*>(&name), size).port();
}

// All addresses at one port; nullopt if that port is taken at one of them.
std::optional<Listener> listenAtPort(const std::vector<Address>& addresses, uint16_t port) {
  Listener listener;
  listener.port = port;
  std::string gone;
  for (const Address& address : addresses) {
    Fd fd = listenAt(address.withPort(listener.port));
    if (!fd && errno == EADDRINUSE) return std::nullopt;
    if (!fd && (errno == EADDRNOTAVAIL || errno == EAFNOSUPPORT)) {
      // It is being made or has been taken away: the others remain.
      gone += ' ';
      gone += address.hostText();
      continue;
    }
    if (!fd)
      throwErrno(
          Failure::kSetup,
          "cannot listen at " + address.withPort(listener.port).text() +
              (errno == EACCES ? " (ports below 1024 need a privilege: RINGREDUCE_PORTS)" : ""));
    if (listener.port == 0) listener.port = portOf(fd);
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
