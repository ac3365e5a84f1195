// Who is at the other end of a connection: both ends prove that they know the group's secret before
// either believes a word.
//
//     dialler                                   acceptor
//     Hello {build, who, to whom, what for, nonce} ->
//                                            <- Challenge {build, nonce, proof of all so far}
//     Proof {proof of all so far}            ->
//                                            <- Welcome {proof of all so far}
//
// A proof is HMAC-SHA256 under the group's secret (RFC 2104) of all bytes exchanged before it and a
// word for its place, so that neither a replay nor a reflection is one.  The acceptor proves first:
// whoever dials the wrong place knows at once, and has given nothing away.  Whoever is wrong is
// told nothing.  Two builds that do not understand each other say so, which needs no secret: the
// build stands first, in a form that stays the same for ever.
//
// A rank may be dialled before its process has heard that it is in the group: then the acceptor
// waits (waitsForGroup) until it is told to look again, or time is up.
//
// These are the two sides as machines that are fed bytes and give bytes: no sockets, no clock, and
// the fuzzer's way in.
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
#include "transport/tcp/sha256.h"

namespace ringreduce::net {

enum class Purpose : uint8_t { kControl, kData, kMessages, kSurvey };
inline constexpr const char* kPurposeNames[] = {"control", "data", "messages", "survey"};
inline constexpr int kPurposes = 4;

inline constexpr Nanos kHandshakeTime = 5 * kSecond;  // what an acceptor gives a caller, in all

struct PeerHello {
  std::string
      group;  // its random word, by which an acceptor finds the secret: 16 hexadecimal digits
  int from = 0, to = 0;
  Purpose purpose = Purpose::kData;
  int connection = 0;      // which of several connections for that purpose
  bool encrypted = false;  // from the end of the handshake on
};

inline constexpr size_t kSecretBytes = 32;
using Secret = std::array<unsigned char, kSecretBytes>;
using Nonce = std::array<unsigned char, 32>;

// From the system's random numbers; throws Error(kSetup) if it has none.
Secret randomSecret();
Nonce randomNonce();
std::string randomGroup();
// A secret as 64 hexadecimal digits; throws Error(kSetup) for a text that is none.
std::string secretText(const Secret& secret);
Secret secretFromText(const std::string& text);

class Handshake {
 public:
  enum class State : uint8_t { kGoesOn, kDone, kRefused };
  // The secret of a caller's group, or none if no such rank of such a group is here.
  using Find = std::function<std::optional<Secret>(const PeerHello&)>;

  // The side that dials.  A nonce is for one handshake: tests alone choose it.
  static Handshake dialler(const PeerHello& self, const Secret& secret,
                           const Nonce& nonce = randomNonce());
  // The side that accepts.
  static Handshake acceptor(Find find, const Nonce& nonce = randomNonce());

  // Takes what has come.  Never takes more than belongs to the handshake: returns how many bytes it
  // took; the rest is the connection's.
  size_t feed(std::span<const std::byte> bytes);
  // How many bytes it would take now at most: whoever reads no more from a socket reads none that
  // are the connection's.
  size_t wants() const;
  // What is to be sent; empty if nothing.  Cleared by taking it.  Also one that has refused may
  // have something to say: its build.
  std::string takeOutput();

  State state() const { return state_; }
  const PeerHello& caller() const { return caller_; }  // proven once kDone
  // Once kDone, the same at both ends and for no other connection.
  Digest keyForEncryption() const;
  // Why it was refused: for the log, and for the error of whoever dialled.
  const std::string& why() const { return why_; }

  // Of the acceptor: the caller's group, or rank, is not here.  Takes nothing until lookAgain.
  bool waitsForGroup() const { return step_ == Step::kGroup; }
  void lookAgain();
  // Of the acceptor: the caller has named a group that is here.
  bool namedGroup() const { return named_group_; }

 private:
  // What is to come next.  Those of the acceptor first.
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
  void take();  // in_ holds what was wanted
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
  std::string in_;      // of the message that is coming
  std::string all_;     // that was exchanged, both ways, in the order of the messages
  std::string output_;  // not yet taken
};

}  // namespace ringreduce::net
