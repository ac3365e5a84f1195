// What one rank knows of another: one struct, kept by the arbiter (health/arbiter.h).
#pragma once

#include <cstdint>

namespace ringreduce {

// What a rank has said of itself.
enum class Declared : uint32_t {
  kHere,
  kLeaving,  // it calls no more collectives and receives no more messages, but still sends some
  kGone,     // it has left
};

// What has been observed of a rank.
enum class Observed : uint8_t {
  kHere,
  kStopped,      // its process was stopped (SIGSTOP, a debugger) when it was last looked at
  kEnded,        // its process ended
  kUnreachable,  // no data comes from it any more
};

struct PeerState {
  Declared declared = Declared::kHere;
  Observed observed = Observed::kHere;
  bool drained = false;  // all bytes that it sent have arrived here

  bool isLost() const { return observed >= Observed::kEnded; }
  bool isHere() const { return !isLost() && declared == Declared::kHere; }
  bool mayStillSend() const { return !drained && observed != Observed::kUnreachable; }
  // It takes part in nothing any more, and all its bytes are here.
  bool isGone() const { return (isLost() || declared == Declared::kGone) && !mayStillSend(); }

  bool operator==(const PeerState&) const = default;
};

// Why a rank is lost, as text after "is lost: ".
inline constexpr char kProcessEnded[] = "its process ended";

}  // namespace ringreduce
