// How far the clock of this host is ahead of the group's, from heartbeats between neighbours in the
// control ring.
//
// A heartbeat carries when it was sent.  Its receiver subtracts that from its own clock: the
// difference is the delay of the network minus how far the sender's clock is ahead.  The next
// heartbeat back carries the smallest recent difference.  So both neighbours know one of each
// direction; half of what they differ by is the offset, and half of their sum, the shortest round
// trip, bounds its error (Cristian 1989; NTP, RFC 5905).  A heartbeat also carries the sender's own
// offset and its error, which add up along the ring, away from rank 0.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

#include "base/clock.h"
#include "control/control_frames.h"

namespace ringreduce::net {

class NeighbourClock {
 public:
  // `shared`: the neighbour is on this host.
  explicit NeighbourClock(bool shared) : shared_(shared) {}

  // A heartbeat of the neighbour that arrived at `time` of CLOCK_MONOTONIC.
  void add(const Heartbeat& beat, Nanos time) {
    if (beat.sent == 0) return;
    beat_ = beat;
    heard_ = time;
    latest_[next_++ % latest_.size()] = {time, time - beat.sent};
  }

  // The smallest difference of recent heartbeats; kNever: none came.
  Nanos difference() const { return smallest().difference; }

  // Two clocks of hosts drift apart by less than this in that time.
  static constexpr Nanos drift(Nanos span) { return span / kMicrosecond * kDrift / 1000; }

  // This rank's offset by way of the neighbour.
  ClockOffset offset(Nanos time) const {
    if (!beat_.offset.isKnown()) return {};
    // Two ranks that each have the other's offset lose it: their errors grow.
    const Nanos error = beat_.offset.error + kMicrosecond + drift(time - heard_);
    if (shared_) return {.ahead = beat_.offset.ahead, .error = error};
    const Sample in = smallest();
    if (beat_.difference == kNever || in.difference == kNever) return {};
    const Nanos neighbour_ahead = (beat_.difference - in.difference) / 2;
    const Nanos half_round_trip = std::max<Nanos>(0, (beat_.difference + in.difference) / 2);
    return {.ahead = beat_.offset.ahead - neighbour_ahead,
            .error = error + half_round_trip + drift(time - in.time) + drift(kWindow)};
  }

 private:
  static constexpr Nanos kDrift = 100;  // nanoseconds in a millisecond
  static constexpr size_t kBeats = 4;
  static constexpr Nanos kWindow = 2 * kSecond;  // in which so many are sent

  struct Sample {
    Nanos time = 0, difference = kNever;
  };
  Sample smallest() const { return *std::ranges::min_element(latest_, {}, &Sample::difference); }

  const bool shared_;
  Heartbeat beat_;
  Nanos heard_ = 0;
  std::array<Sample, kBeats> latest_{};
  size_t next_ = 0;
};

}  // namespace ringreduce::net
