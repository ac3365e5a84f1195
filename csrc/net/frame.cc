// Sealing and looking at frames.
#include "net/frame.h"

#include "net/crc32c.h"

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
