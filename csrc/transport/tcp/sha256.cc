// The hash, as in the standard.
#include "transport/tcp/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace ringreduce::net {
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

}  // namespace ringreduce::net
