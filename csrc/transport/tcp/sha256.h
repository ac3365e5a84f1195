// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104), by which ranks prove that they know the secret.
//
// A handshake hashes a few hundred bytes, so this is simple and portable, not fast.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ringreduce::net {

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

}  // namespace ringreduce::net
