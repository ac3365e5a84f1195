// Encryption of a connection: TLS 1.3 with a pre-shared key, over a non-blocking socket that the
// caller owns.
//
// The key is new for each connection: both ends derive it from the group's secret and the bytes of
// their handshake (transport/tcp/handshake.h).  So no certificates are needed, a peer without the
// secret fails, and connections cannot be confused.  A Diffie-Hellman exchange adds forward
// secrecy: recorded bytes stay unreadable if the secret leaks later.
//
// TLS's end of stream is not sent: a connection ends as a plain one does, and earlier bytes arrive.
// One thread at a time uses it.
//
// Uses OpenSSL 3 if the build has found it (RINGREDUCE_OPENSSL in CMakeLists.txt).
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <memory>
#include <string>

#include "transport/tcp/handshake.h"

namespace ringreduce::net {

class Tls {
 public:
  enum class Side { kDialler, kAcceptor };
  enum class State { kGoesOn, kDone, kRefused, kEnded };

  // Whether this build has OpenSSL.
  static bool isBuiltIn();
  // "OpenSSL 3.0.19", or what is missing.
  static std::string version();
  // Throws Error(kSetup) if this build has none.  Updates the key after so many sent bytes.
  static std::unique_ptr<Tls> make(Side side, int socket, const Digest& key,
                                   size_t bytes_of_a_key = kBytesOfAKey);
  virtual ~Tls() = default;

  // Continues the handshake as far as possible.  Does not read beyond it.
  virtual State shakeHands() = 0;
  // Whether the handshake waits until the socket takes bytes.
  virtual bool wantsToWrite() const = 0;
  // After kRefused, and kEnded: the connection is over.
  virtual const std::string& why() const = 0;

  // After kDone, as sendmsg and recvmsg on the socket.  The result of send() counts bytes that the
  // kernel has taken.  A short count means that the socket is full, or empty, for now.  After
  // EAGAIN, or a part, offer the same remaining bytes again before others.  EBADMSG: the bytes that
  // arrived were not sent by the other end.
  virtual ssize_t send(const iovec* pieces, size_t count) = 0;
  virtual ssize_t receive(const iovec* pieces, size_t count) = 0;
  // Whether bytes were read from the socket that receive() has not returned yet.
  virtual bool holdsBytes() const = 0;
  // Bytes that were read from the socket, as they travel.
  virtual uint64_t bytesRead() const = 0;

  // Far below the limit of one AES-GCM key.
  static constexpr size_t kBytesOfAKey = size_t{64} << 30;
};

}  // namespace ringreduce::net
