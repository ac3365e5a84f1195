// What stands before the bytes of a stream on a connection: which of the stream's bytes they are.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringreduce::net {

inline constexpr uint32_t kFrameMagic = 0x52523246;  // "RR2F"
inline constexpr size_t kLargestFrame = 256 << 10;

struct Frame {
  uint32_t magic = kFrameMagic;
  uint32_t bytes = 0;     // that follow
  uint64_t position = 0;  // of the first of them in the stream
  uint64_t header = 0;    // CRC32C of the fields above; the upper half is 0
};
static_assert(sizeof(Frame) == 24);

// With its header's checksum filled in.
Frame sealed(Frame frame);
// Whether it is a frame: its magic, its checksum, a length that can be.
bool isSound(const Frame& frame);

}  // namespace ringreduce::net
