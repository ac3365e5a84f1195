// The header before the bytes of a stream on a connection, and its checksum.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringreduce::net {

inline constexpr uint32_t kFrameMagic = 0x52523246;  // "RR2F"
inline constexpr size_t kLargestFrame = 256 << 10;

struct Frame {
  uint32_t magic = kFrameMagic;
  uint32_t bytes = 0;     // of payload, which follow
  uint64_t position = 0;  // of the first payload byte in the stream
  uint64_t header = 0;    // CRC-32C of the fields above; the upper half is 0
};
static_assert(sizeof(Frame) == 24);

// Fills in the checksum.
Frame sealed(Frame frame);
// Whether magic, checksum and length are valid.
bool isSound(const Frame& frame);

// CRC-32C (Castagnoli).
uint32_t crc32c(const void* data, size_t bytes);

}  // namespace ringreduce::net
