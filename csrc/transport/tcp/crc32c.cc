// One byte at a time, by a table: headers have some 20 bytes.
#include "transport/tcp/crc32c.h"

#include <array>

namespace ringreduce::net {
namespace {

// The sum of each byte.
constexpr std::array<uint32_t, 256> kSumOfByte = [] {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t sum = byte;
    for (int bit = 0; bit < 8; ++bit) sum = sum >> 1 ^ (sum & 1 ? 0x82f63b78U : 0);
    table[byte] = sum;
  }
  return table;
}();

}  // namespace

uint32_t crc32c(const void* data, size_t bytes) {
  const auto* next = static_cast<const unsigned char*>(data);
  uint32_t sum = ~uint32_t{0};
  for (; bytes > 0; --bytes) sum = sum >> 8 ^ kSumOfByte[(sum ^ *next++) & 255];
  return ~sum;
}

}  // namespace ringreduce::net
