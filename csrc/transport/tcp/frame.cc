// Sealing and looking at frames.
#include "transport/tcp/frame.h"

#include "transport/tcp/crc32c.h"

namespace ringreduce::net {

Frame sealed(Frame frame) {
  frame.header = crc32c(&frame, offsetof(Frame, header));
  return frame;
}

bool isSound(const Frame& frame) {
  return frame.magic == kFrameMagic && frame.bytes > 0 && frame.bytes <= kLargestFrame &&
         frame.header == crc32c(&frame, offsetof(Frame, header));
}

}  // namespace ringreduce::net
