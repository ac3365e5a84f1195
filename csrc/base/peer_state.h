// The state of a rank as another knows it: declared by the rank itself, or observed.
#pragma once

#include <cstdint>

namespace ringreduce {

// How far a rank has left normally.
enum class Departure : uint32_t {
  kHere,
  kLeaving,  // calls no more collectives and receives no more messages, but still sends some
  kGone,
};

// What is known of a rank that shares no memory with this one.  Data of a rank that has left or
// ended may still be on its way.  No data comes from an unreachable rank.
enum class PeerState : uint8_t { kHere, kLeft, kEnded, kUnreachable };

}  // namespace ringreduce
