// CRC-32C by a table, one byte at a time: a header has some 20 bytes.
#include "transport/tcp/frame.h"

#include <array>

namespace ringreduce::net {
namespace {

// The CRC of each byte.
constexpr std::array<uint32_t, 256> kCrcOfByte = [] {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78U : 0);
    table[byte] = crc;
  }
  return table;
}();

}  // namespace

uint32_t crc32c(const void* data, size_t bytes) {
  const auto* next = static_cast<const unsigned char*>(data);
  uint32_t crc = ~uint32_t{0};
  for (; bytes > 0; --bytes) crc = crc >> 8 ^ kCrcOfByte[(crc ^ *next++) & 255];
  return ~crc;
}

Frame sealed(Frame frame) {
  frame.header = crc32c(&frame, offsetof(Frame, header));
  return frame;
}

bool isSound(const Frame& frame) {
  return frame.magic == kFrameMagic && frame.bytes > 0 && frame.bytes <= kLargestFrame &&
         frame.header == crc32c(&frame, offsetof(Frame, header));
}

}  // namespace ringreduce::net
