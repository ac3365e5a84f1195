// Mutual authentication of a connection: both ends prove that they know the group's secret before
// either trusts the other.
//
//     dialler                                   acceptor
//     Hello {build, from, to, purpose, nonce} ->
//                                            <- Challenge {build, nonce, proof of all so far}
//     Proof {proof of all so far}            ->
//                                            <- Welcome {proof of all so far}
//
// A proof is HMAC-SHA256 (RFC 2104) with the group's secret over all bytes exchanged before it and
// a label for its place, so replays and reflections fail.  The acceptor proves first: a rank that
// dials a wrong address notices at once and reveals nothing.  A peer that fails gets no reason. Two
// incompatible builds report that without a secret: the build comes first, in a format that never
// changes.
//
// A rank may be dialled before its process knows that it is in the group.  Then the acceptor waits
// (waitsForGroup) until lookAgain() or a timeout.
//
// Both sides are state machines that take and give bytes, without sockets or a clock.  The fuzzer
// drives them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/clock.h"

namespace ringreduce::net {

// ---- the proofs: SHA-256 (FIPS 180-4) and HMAC-SHA256.  A handshake hashes a few hundred bytes,
// so they are simple and portable, not fast.

using Digest = std::array<unsigned char, 32>;

class Sha256 {
 public:
  Sha256& add(std::string_view bytes);
  Digest digest() const;  // of all bytes so far; more may be added

 private:
  void take(const unsigned char* block);

  std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<unsigned char, 64> block_{};  // the bytes of the last block, if it is not full yet
  uint64_t bytes_ = 0;
};

// The authentication code of `first` followed by `second`.
Digest hmacSha256(std::string_view key, std::string_view first, std::string_view second = {});

// In constant time.
bool sameDigest(const Digest& a, const Digest& b);

// A digest, a secret or a nonce as bytes.
inline std::string_view bytesOf(const std::array<unsigned char, 32>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

enum class Purpose : uint8_t { kControl, kData, kMessages, kSurvey };
inline constexpr int kPurposes = 4;

struct PeerHello {
  // The group's random id, by which an acceptor finds the secret: 16 hexadecimal digits.
  std::string group;
  int from = 0, to = 0;
  Purpose purpose = Purpose::kData;
  int connection = 0;      // which of several connections for that purpose
  bool encrypted = false;  // from the end of the handshake on
};

inline constexpr size_t kSecretBytes = 32;
using Secret = std::array<unsigned char, kSecretBytes>;
using Nonce = std::array<unsigned char, 32>;

// From the kernel's random numbers; throw Error(kSetup) if there are none.
Secret randomSecret();
Nonce randomNonce();
std::string randomGroup();
// A secret as 64 hexadecimal digits; throws Error(kSetup) for an invalid text.
std::string secretText(const Secret& secret);
Secret secretFromText(const std::string& text);

class Handshake {
 public:
  enum class State : uint8_t { kGoesOn, kDone, kRefused };
  // The secret of a caller's group, or none if that rank of that group is not here.
  using Find = std::function<std::optional<Secret>(const PeerHello&)>;

  // The side that dials.  A nonce is for one handshake; only tests choose it.
  static Handshake dialler(const PeerHello& self, const Secret& secret,
                           const Nonce& nonce = randomNonce());
  // The side that accepts.
  static Handshake acceptor(Find find, const Nonce& nonce = randomNonce());

  // Takes received bytes, but none beyond the handshake.  Returns how many it took.
  size_t feed(std::span<const std::byte> bytes);
  // How many bytes it would take now at most.  Do not read more from the socket.
  size_t wants() const;
  // Returns and clears the bytes to send.  A refusal may have some too: the build.
  std::string takeOutput();

  State state() const { return state_; }
  const PeerHello& caller() const { return caller_; }  // authenticated once kDone
  // After kDone.  The same at both ends, and different for each connection.
  Digest keyForEncryption() const;
  // Why it was refused, for the log and for the dialling rank's error.
  const std::string& why() const { return why_; }

  // Acceptor: the caller's group or rank is not here.  Takes nothing until lookAgain.
  bool waitsForGroup() const { return step_ == Step::kGroup; }
  void lookAgain();
  // Acceptor: the caller has named a group that is here.
  bool namedGroup() const { return named_group_; }

 private:
  // The message that is expected next; those of the acceptor first.
  enum class Step : uint8_t {
    kHelloBuild,
    kHello,
    kGroup,
    kProof,
    kBuild,
    kChallenge,
    kWelcome,
    kNothing
  };

  Handshake() = default;
  void take();  // in_ is complete
  void takeHello();
  void answerHello(const Secret& secret);
  bool isBuildOurs(const char* who);
  bool isProven(std::string_view place);
  void say(std::string_view bytes);
  std::string proof(std::string_view place) const;
  void expect(Step step);
  void refuse(const std::string& why);

  State state_ = State::kGoesOn;
  Step step_ = Step::kNothing;
  bool named_group_ = false;
  PeerHello caller_;
  std::string why_;
  Find find_;
  Nonce nonce_{};
  Secret secret_{};
  std::string in_;      // of the message that is being received
  std::string all_;     // bytes exchanged in both directions, in order
  std::string output_;  // not yet taken
};

}  // namespace ringreduce::net
