// The messages as bytes, and the two state machines.
//
//     Hello      build 32 | group 16 | from 4 | to 4 | connection 4 | purpose 1 | encrypted 1 | 0 0
//                | nonce 32
//     Challenge  build 32 | nonce 32 | proof 32
//     Proof      proof 32
//     Welcome    proof 32
//
// Numbers are little-endian.  A build is text, "ringreduce 1.2.3 wire 5" and a new line, with zeros
// up to its length.
#include "transport/tcp/handshake.h"

#include <sys/random.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/text.h"

namespace ringreduce::net {

// ---- SHA-256 and HMAC, as in the standards

namespace {

constexpr size_t kBlock = 64;

// The first 32 bits of the fractions of the cube roots of the first 64 primes.
constexpr uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t bigEndian(const unsigned char* bytes) {
  return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 | uint32_t{bytes[2]} << 8 | bytes[3];
}

void putBigEndian(unsigned char* bytes, uint64_t value, int size) {
  for (int i = size - 1; i >= 0; --i, value >>= 8) bytes[i] = static_cast<unsigned char>(value);
}

}  // namespace

void Sha256::take(const unsigned char* block) {
  std::array<uint32_t, 64> w;
  for (size_t t = 0; t < 16; ++t) w[t] = bigEndian(block + 4 * t);
  for (size_t t = 16; t < 64; ++t) {
    const uint32_t a = w[t - 15], b = w[t - 2];
    w[t] = w[t - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) + w[t - 7] +
           (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (size_t t = 0; t < 64; ++t) {
    const uint32_t first = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) +
                           ((e & f) ^ (~e & g)) + kRounds[t] + w[t];
    const uint32_t second =
        (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
  }
  const uint32_t ends[] = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < 8; ++i) state_[i] += ends[i];
}

Sha256& Sha256::add(std::string_view bytes) {
  const auto* data = reinterpret_cast<const unsigned char*>(bytes.data());
  size_t left = bytes.size();
  while (left > 0) {
    const size_t held = bytes_ % kBlock;
    const size_t part = std::min(left, kBlock - held);
    if (part == kBlock) {
      take(data);
    } else {
      std::memcpy(block_.data() + held, data, part);
      if (held + part == kBlock) take(block_.data());
    }
    data += part, left -= part, bytes_ += part;
  }
  return *this;
}

Digest Sha256::digest() const {
  Sha256 last = *this;
  unsigned char padding[2 * kBlock] = {0x80};
  const size_t held = bytes_ % kBlock;
  const size_t zeros = (held < kBlock - 8 ? kBlock : 2 * kBlock) - held - 8;  // with the 0x80
  putBigEndian(padding + zeros, bytes_ * 8, 8);
  last.add({reinterpret_cast<const char*>(padding), zeros + 8});
  Digest digest;
  for (size_t i = 0; i < 8; ++i) putBigEndian(digest.data() + 4 * i, last.state_[i], 4);
  return digest;
}

Digest hmacSha256(std::string_view key, std::string_view first, std::string_view second) {
  const Digest hashed = Sha256().add(key).digest();
  if (key.size() > kBlock) key = bytesOf(hashed);
  std::array<char, kBlock> inner, outer;
  inner.fill(0x36);
  outer.fill(0x5c);
  for (size_t i = 0; i < key.size(); ++i) {
    inner[i] = static_cast<char>(inner[i] ^ key[i]);
    outer[i] = static_cast<char>(outer[i] ^ key[i]);
  }
  const Digest within = Sha256().add({inner.data(), inner.size()}).add(first).add(second).digest();
  return Sha256().add({outer.data(), outer.size()}).add(bytesOf(within)).digest();
}

bool sameDigest(const Digest& a, const Digest& b) {
  volatile unsigned char difference = 0;  // volatile: no early exit
  for (size_t i = 0; i < a.size(); ++i)
    difference = static_cast<unsigned char>(difference | (a[i] ^ b[i]));
  return difference == 0;
}

namespace {

// Version of everything that ranks of different hosts send each other.
#define RINGREDUCE_WIRE_VERSION "6"

constexpr size_t kBuildBytes = 32, kGroupBytes = 16, kProofBytes = sizeof(Digest);
constexpr size_t kHelloBytes = kGroupBytes + 3 * 4 + 4 + sizeof(Nonce);  // without the build
constexpr std::string_view kFamily = "ringreduce ";
constexpr char kBuildText[] =
    "ringreduce " RINGREDUCE_VERSION " wire " RINGREDUCE_WIRE_VERSION "\n";
static_assert(sizeof kBuildText - 1 <= kBuildBytes);

constexpr std::string_view kAcceptorPlace = "ringreduce challenge";
constexpr std::string_view kDiallerPlace = "ringreduce proof    ";
constexpr std::string_view kWelcomePlace = "ringreduce welcome  ";
constexpr std::string_view kKeyPlace = "ringreduce key      ";
// Of equal length, so that label and data cannot be split differently.
static_assert(kAcceptorPlace.size() == kDiallerPlace.size());
static_assert(kAcceptorPlace.size() == kWelcomePlace.size());
static_assert(kAcceptorPlace.size() == kKeyPlace.size());

std::string build() {
  std::string text = kBuildText;
  text.resize(kBuildBytes, '\0');
  return text;
}

// A build as another process sent it, made printable.
std::string readable(std::string_view build) {
  build = build.substr(0, build.find_first_of(std::string_view("\n\0", 2)));
  std::string text;
  for (char c : build) text += c >= ' ' && c <= '~' ? c : '?';
  return text;
}

void putNumber(std::string& text, uint32_t number) {
  for (int i = 0; i < 4; ++i) text += static_cast<char>(number >> 8 * i & 255);
}

// Removes the number at the start of the text and returns it; -1 if an int cannot hold it.
int takeNumber(std::string_view& text) {
  uint32_t number = 0;
  for (size_t i = 0; i < 4; ++i) number |= uint32_t{static_cast<unsigned char>(text[i])} << 8 * i;
  text.remove_prefix(4);
  return number > INT32_MAX ? -1 : static_cast<int>(number);
}

bool isGroup(std::string_view word) {
  return word.size() == kGroupBytes && isHex(word);
}

void fillRandom(void* data, size_t bytes) {
  ssize_t got;
  do got = getrandom(data, bytes, 0);
  while (got < 0 && errno == EINTR);
  if (got != static_cast<ssize_t>(bytes))  // it returns up to 256 bytes at once
    throwErrno(Failure::kSetup, "no random numbers to be had");
}

}  // namespace

Secret randomSecret() {
  Secret secret;
  fillRandom(secret.data(), secret.size());
  return secret;
}

Nonce randomNonce() {
  return randomSecret();
}

std::string randomGroup() {
  return secretText(randomSecret()).substr(0, kGroupBytes);
}

std::string secretText(const Secret& secret) {
  return hexText(secret);
}

Secret secretFromText(const std::string& text) {
  Secret secret;
  if (!fromHex(text, secret.data(), secret.size()))
    throw Error(Failure::kSetup,
                "the store holds no secret where the group's should be: another "
                "program may have written there");
  return secret;
}

Handshake Handshake::dialler(const PeerHello& self, const Secret& secret, const Nonce& nonce) {
  if (!isGroup(self.group) || self.from < 0 || self.to < 0 || self.connection < 0)
    throw Error(Failure::kArgument, "a caller names a group by 16 hexadecimal digits (not '" +
                                        self.group +
                                        "') and ranks and a connection number from 0 on");
  Handshake machine;
  machine.caller_ = self;
  machine.secret_ = secret;
  std::string hello = build() + self.group;
  for (int number : {self.from, self.to, self.connection})
    putNumber(hello, static_cast<uint32_t>(number));
  hello += static_cast<char>(self.purpose);
  hello += static_cast<char>(self.encrypted);
  hello.append(2, '\0');
  hello += bytesOf(nonce);
  machine.say(hello);
  machine.expect(Step::kBuild);
  return machine;
}

Handshake Handshake::acceptor(Find find, const Nonce& nonce) {
  Handshake machine;
  machine.find_ = std::move(find);
  machine.nonce_ = nonce;
  machine.expect(Step::kHelloBuild);
  return machine;
}

size_t Handshake::wants() const {
  const auto missing = [&](size_t whole) { return whole - in_.size(); };
  switch (step_) {
    case Step::kHelloBuild:
    case Step::kBuild:
      return missing(kBuildBytes);
    case Step::kHello:
      return missing(kHelloBytes);
    case Step::kChallenge:
      return missing(sizeof(Nonce) + kProofBytes);
    case Step::kProof:
    case Step::kWelcome:
      return missing(kProofBytes);
    case Step::kGroup:
    case Step::kNothing:
      return 0;
  }
  return 0;
}

size_t Handshake::feed(std::span<const std::byte> bytes) {
  size_t taken = 0;
  while (taken < bytes.size() && wants() > 0) {
    const size_t part = std::min(wants(), bytes.size() - taken);
    in_.append(reinterpret_cast<const char*>(bytes.data()) + taken, part);
    taken += part;
    if (wants() == 0) take();
  }
  return taken;
}

std::string Handshake::takeOutput() {
  return std::exchange(output_, {});
}

void Handshake::take() {
  switch (step_) {
    case Step::kHelloBuild:
      if (!isBuildOurs("the caller")) return;
      return expect(Step::kHello);
    case Step::kHello:
      return takeHello();
    case Step::kProof:
      if (!isProven(kDiallerPlace)) return refuse("its proof is wrong: it has another secret");
      say(proof(kWelcomePlace));
      expect(Step::kNothing);
      state_ = State::kDone;
      return;
    case Step::kBuild:
      if (!isBuildOurs("what answers there")) return;
      return expect(Step::kChallenge);
    case Step::kChallenge:
      all_ += in_.substr(0, sizeof(Nonce));
      in_.erase(0, sizeof(Nonce));
      if (!isProven(kAcceptorPlace))
        return refuse("what answers there has another secret: it is of another group");
      say(proof(kDiallerPlace));
      return expect(Step::kWelcome);
    case Step::kWelcome:
      if (!isProven(kWelcomePlace)) return refuse("its welcome is wrong: bytes were changed");
      expect(Step::kNothing);
      state_ = State::kDone;
      return;
    case Step::kGroup:
    case Step::kNothing:
      return;
  }
}

// Whether in_ is our own build.  If not, the acceptor sends its own: otherwise the dialling rank
// could not know why it is refused.
bool Handshake::isBuildOurs(const char* who) {
  all_ += in_;
  if (in_ == build()) return true;
  if (in_.compare(0, kFamily.size(), kFamily) != 0) {
    refuse(std::string(who) + " is no rank of ringreduce");
    return false;
  }
  if (step_ == Step::kHelloBuild) output_ = build();
  refuse(std::string(who) + " is " + readable(in_) + ", this is " + readable(build()) +
         ": install the same version on all hosts");
  return false;
}

void Handshake::takeHello() {
  std::string_view hello = in_;
  caller_.group = hello.substr(0, kGroupBytes);
  hello.remove_prefix(kGroupBytes);
  caller_.from = takeNumber(hello);
  caller_.to = takeNumber(hello);
  caller_.connection = takeNumber(hello);
  const auto purpose = static_cast<unsigned char>(hello[0]);
  const auto encrypted = static_cast<unsigned char>(hello[1]);
  const bool zeros = hello.substr(2, 2) == std::string_view("\0\0", 2);
  if (!isGroup(caller_.group) || caller_.from < 0 || caller_.to < 0 || caller_.connection < 0 ||
      purpose >= kPurposes || encrypted > 1 || !zeros)
    return refuse("its hello is wrong: bytes were changed");
  caller_.purpose = static_cast<Purpose>(purpose);
  caller_.encrypted = encrypted == 1;
  all_ += in_;
  expect(Step::kGroup);
  lookAgain();
}

void Handshake::lookAgain() {
  if (!waitsForGroup()) return;
  if (const auto secret = find_(caller_)) answerHello(*secret);
}

void Handshake::answerHello(const Secret& secret) {
  named_group_ = true;
  secret_ = secret;
  say(build());
  say(bytesOf(nonce_));
  say(proof(kAcceptorPlace));
  expect(Step::kProof);
}

std::string Handshake::proof(std::string_view place) const {
  return std::string(bytesOf(hmacSha256(bytesOf(secret_), place, all_)));
}

Digest Handshake::keyForEncryption() const {
  return hmacSha256(bytesOf(secret_), kKeyPlace, all_);
}

bool Handshake::isProven(std::string_view place) {
  Digest given;
  std::copy(in_.begin(), in_.end(), given.begin());
  const bool right = sameDigest(given, hmacSha256(bytesOf(secret_), place, all_));
  all_ += in_;
  return right;
}

void Handshake::say(std::string_view bytes) {
  output_ += bytes;
  all_ += bytes;
}

void Handshake::expect(Step step) {
  in_.clear();
  step_ = step;
}

void Handshake::refuse(const std::string& why) {
  state_ = State::kRefused;
  why_ = why;
  expect(Step::kNothing);
}

}  // namespace ringreduce::net
