// Unix sockets, SCM_RIGHTS and peer credentials.
#include "bootstrap/unix_socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "base/error.h"
#include "base/limits.h"
#include "base/text.h"
#include "bootstrap/attempt.h"
#include "transport/tcp/handshake.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77  // Linux 6.5
#endif

namespace ringreduce {

namespace {

constexpr size_t kMostBytes = 4096;

socklen_t abstractAddress(const std::string& name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  if (name.size() + 1 > sizeof address.sun_path)
    throw Error(Failure::kSetup, "socket name too long: " + name);
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

Fd newSocket() {
  Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throwErrno(Failure::kSetup, "cannot make a Unix socket");
  return fd;
}

}  // namespace

Fd listenAt(const std::string& name, int backlog) {
  Fd fd = newSocket();
  sockaddr_un address;
  const socklen_t size = abstractAddress(name, address);
  if (bind(fd.get(), reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      listen(fd.get(), backlog) != 0)
    throwErrno(Failure::kSetup, "cannot listen on a Unix socket");
  return fd;
}

Fd acceptFrom(const Fd& listener) {
  Fd fd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd && (errno == EMFILE || errno == ENFILE))
    throwErrno(Failure::kSetup, "cannot accept a rank's connection");
  return fd;
}

Fd connectTo(const std::string& name) {
  Fd fd = newSocket();
  sockaddr_un address;
  const socklen_t size = abstractAddress(name, address);
  if (connect(fd.get(), reinterpret_cast<sockaddr*>(&address), size) == 0) return fd;
  // EAGAIN: its queue of callers is full; the caller tries again.
  if (errno == ECONNREFUSED || errno == EAGAIN) return Fd();
  throwErrno(Failure::kSetup, "cannot connect to a rank's Unix socket");
}

Peer peerOf(const Fd& socket) {
  ucred credentials{};
  socklen_t size = sizeof credentials;
  if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0)
    throwErrno(Failure::kSetup, "cannot ask who is at the other end of a Unix socket");
  return {credentials.pid, credentials.uid};
}

Fd pidfdOf(const Fd& socket, const Peer& peer) {
  int fd = -1;
  socklen_t size = sizeof fd;
  if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERPIDFD, &fd, &size) == 0) return Fd(fd);
  // An older kernel: by number.  The peer is waiting for our answer, so the number is still its
  // own.
  if (peer.pid <= 0) return Fd();
  return Fd(static_cast<int>(syscall(SYS_pidfd_open, peer.pid, 0)));
}

Sent trySendPacket(const Fd& socket, const std::string& bytes, const std::vector<int>& fds) {
  if (bytes.size() > kMostBytes)
    throw Error(Failure::kSetup, "a message of " + std::to_string(bytes.size()) +
                                     " bytes to a rank of this host does not fit a packet");
  iovec part{.iov_base = const_cast<char*>(bytes.data()), .iov_len = bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMostFds * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
  }
  for (;;) {
    if (sendmsg(socket.get(), &message, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()))
      return Sent::kMessage;
    if (errno == EINTR) continue;
    // What this system lacks for a moment says nothing of the peer.
    constexpr int kPassing[] = {EAGAIN, ETOOMANYREFS, ENOBUFS, ENOMEM};
    return std::ranges::find(kPassing, errno) != std::end(kPassing) ? Sent::kNotYet : Sent::kGone;
  }
}

bool sendPacket(const Fd& socket, const std::string& bytes, const std::vector<int>& fds) {
  // The socket does not block; its buffer may be full for a moment, when the table of a large group
  // goes out faster than the peer reads it.
  const Nanos deadline = deadlineIn(limits::kDeaf);
  for (;;) {
    const Sent sent = trySendPacket(socket, bytes, fds);
    if (sent != Sent::kNotYet || now() > deadline) return sent == Sent::kMessage;
    if (errno != EAGAIN) {  // which no event ends
      ::poll(nullptr, 0, 5);
      continue;
    }
    pollfd wanted{.fd = socket.get(), .events = POLLOUT, .revents = 0};
    ::poll(&wanted, 1, 100);
  }
}

Received receivePacket(const Fd& socket, Packet& packet) {
  packet = {};
  packet.bytes.resize(kMostBytes);
  iovec part{.iov_base = packet.bytes.data(), .iov_len = packet.bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kMostFds * sizeof(int))];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  // A peer that closed before it had read everything of ours makes the first call fail with
  // ECONNRESET, although its last message is there: the next call has it.
  ssize_t size = -1;
  for (int tries = 0; tries < 2; ++tries) {
    do size = recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC);
    while (size < 0 && errno == EINTR);
    if (size >= 0 || errno != ECONNRESET) break;
  }
  if (size < 0) return errno == EAGAIN ? Received::kNothingYet : Received::kClosed;
  for (cmsghdr* h = CMSG_FIRSTHDR(&message); h; h = CMSG_NXTHDR(&message, h)) {
    if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = 0; at + sizeof(int) <= h->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(h) + at, sizeof fd);
      packet.fds.emplace_back(fd);
    }
  }
  packet.bytes.resize(static_cast<size_t>(size));
  if (message.msg_flags & MSG_CTRUNC)
    throw Error(Failure::kSetup, "this process may open no more files (ulimit -n)");
  return size == 0 ? Received::kClosed : Received::kMessage;
}

void waitReadable(const std::vector<int>& fds, Nanos longest) {
  std::vector<pollfd> wanted;
  for (int fd : fds) wanted.push_back({.fd = fd, .events = POLLIN, .revents = 0});
  ::poll(wanted.data(), wanted.size(),
         static_cast<int>(std::max<Nanos>(0, longest) / kMillisecond));
}

// ---- messages

std::string encode(const Fields& fields) {
  std::string text;
  for (const auto& [key, value] : fields) {
    text += key + '=';
    for (char c : value) text += c == '\n' ? ' ' : c;
    text += '\n';
  }
  return text;
}

Fields decode(const std::string& text) {
  Fields fields;
  TextReader lines(text);
  for (std::string line; std::getline(lines, line);)
    if (const size_t at = line.find('='); at != std::string::npos)
      fields[line.substr(0, at)] = line.substr(at + 1);
  return fields;
}

int64_t number(const Fields& fields, const char* key) {
  const auto found = fields.find(key);
  if (found == fields.end() || found->second.empty()) return -1;
  char* end = nullptr;
  const long value = std::strtol(found->second.c_str(), &end, 10);
  return *end || value < 0 ? -1 : value;
}

std::string fieldOf(const Fields& fields, const char* key) {
  const auto found = fields.find(key);
  return found == fields.end() ? "" : found->second;
}

std::string randomSecretText() {
  return net::secretText(net::randomSecret());
}

bool sameSecret(const std::string& a, const std::string& b) {
  if (a.size() != b.size()) return false;
  int difference = 0;  // looks at every byte, so that time tells nothing
  for (size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == 0;
}

}  // namespace ringreduce
