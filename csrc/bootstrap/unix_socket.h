// Messages and file descriptors between processes of one host, over abstract Unix sockets; and the
// format of these messages and of the entries in the store: lines of key=value.
//
// An abstract socket has no file, so nothing is left behind.  Any process of the machine may
// connect to it, so both ends ask the kernel for their peer (peerOf) before they read a byte.
#pragma once

#include <sys/types.h>

#include <map>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/fd.h"

namespace ringreduce {

struct Packet {
  std::string bytes;
  std::vector<Fd> fds;
};

struct Peer {
  pid_t pid;  // 0 if it is in a process-id namespace that ours does not contain
  uid_t uid;
};

// A listening SOCK_SEQPACKET socket at an abstract name, with room for `backlog` callers.
Fd listenAt(const std::string& name, int backlog);

// The next caller, or none for now.  Throws Error(kSetup) when there are no descriptors left.
Fd acceptFrom(const Fd& listener);

// None if no process listens there.  Throws Error(kSetup) for anything else.
Fd connectTo(const std::string& name);

Peer peerOf(const Fd& socket);

// A descriptor that becomes readable when the peer's process ends; none where the kernel has no
// way.
Fd pidfdOf(const Fd& socket, const Peer& peer);

inline constexpr int kMostFds = 12;  // in a message

enum class Sent { kMessage, kNotYet, kGone };
// Sends a whole message without waiting.  kNotYet: its buffer is full, too many descriptors are in
// flight that were not received yet, or the system has no memory for it.
Sent trySendPacket(const Fd& socket, const std::string& bytes, const std::vector<int>& fds = {});

// Sends a whole message.  False if the peer has gone, or takes nothing for ten seconds.
bool sendPacket(const Fd& socket, const std::string& bytes, const std::vector<int>& fds = {});

enum class Received { kMessage, kNothingYet, kClosed };
// Takes the next message without waiting.
Received receivePacket(const Fd& socket, Packet& packet);

// Waits until one of the sockets can be read or `longest` has passed.
void waitReadable(const std::vector<int>& fds, Nanos longest);

// ---- messages

inline constexpr char kVersion[] = "15";  // of these messages and of the layout of shared memory

using Fields = std::map<std::string, std::string>;
std::string encode(const Fields& fields);
Fields decode(const std::string& text);
std::string fieldOf(const Fields& fields, const char* key);  // "" if it is not there
int64_t number(const Fields& fields, const char* key);       // -1 if it is not there, or no number

std::string randomSecretText();
bool sameSecret(const std::string& a, const std::string& b);

}  // namespace ringreduce
