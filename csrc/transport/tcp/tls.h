// Encryption of a connection: TLS 1.3 with a key that both ends have already, over a non-blocking
// socket that stays the caller's.
//
// The key is new for each connection: both ends make it from the group's secret and all that their
// handshake has said (transport/tcp/handshake.h).  So no certificates are needed, whoever lacks the
// secret does not get through, and a connection cannot be mistaken for another.  A Diffie-Hellman
// exchange goes with it: who records the bytes and learns the secret later cannot read them.
//
// Ends are not announced: a connection ends as a plain one does, and what was sent before arrives.
// One thread at a time uses it.
//
// By OpenSSL 3, where the build has found it (RINGREDUCE_OPENSSL in CMakeLists.txt).
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <memory>
#include <string>

#include "transport/tcp/sha256.h"

namespace ringreduce::net {

class Tls {
 public:
  enum class Side { kDialler, kAcceptor };
  enum class State { kGoesOn, kDone, kRefused, kEnded };

  // Whether this build has it.
  static bool isBuiltIn();
  // "OpenSSL 3.0.19", or what is missing.
  static std::string version();
  // Throws Error(kSetup) if this build has none.  Changes keys each time that it has sent so many
  // bytes.
  static std::unique_ptr<Tls> make(Side side, int socket, const Digest& key,
                                   size_t bytes_of_a_key = kBytesOfAKey);
  virtual ~Tls() = default;

  // Goes on with the handshake as far as it goes; reads nothing that follows it.
  virtual State shakeHands() = 0;
  // Whether it waits for the socket to take bytes, not only to bring some.
  virtual bool wantsToWrite() const = 0;
  // After kRefused, and kEnded: the connection is over.
  virtual const std::string& why() const = 0;

  // After kDone, as sendmsg and recvmsg on the socket: what was sent has all been handed to the
  // system, and less than there was means that it takes, or has, no more for now.  After EAGAIN, or
  // a part, the bytes that were not taken must be offered again before others.  EBADMSG: what came
  // was not sent by the other end.
  virtual ssize_t send(const iovec* pieces, size_t count) = 0;
  virtual ssize_t receive(const iovec* pieces, size_t count) = 0;
  // Whether bytes have been taken from the socket that were not received yet.
  virtual bool holdsBytes() const = 0;

  // Far below what one key of AES-GCM is good for.
  static constexpr size_t kBytesOfAKey = size_t{64} << 30;
};

}  // namespace ringreduce::net
