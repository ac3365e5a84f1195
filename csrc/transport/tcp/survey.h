// How fast a line is: one end of a connection sends as much as it takes for a short time, and the
// other counts what comes.  One way at a time: where both directions are full the acknowledgements
// of the faster wait in the queue of the slower.
//
// Hosts meet in pairs, in rounds in which each has at most one partner, so that no host's line is
// shared by two measurements and all pairs of H hosts take H-1 rounds, or H.
//
// The rate is that of the second half of what came: the first is for TCP to find out what the line
// carries.  That takes some round trips, so a burst lasts kRoundTrips of them; never longer than
// kLongest, and never more than kMostBytes.
#pragma once

#include <cstddef>
#include <functional>
#include <string>

#include "base/clock.h"
#include "base/fd.h"
#include "transport/tcp/socket.h"

namespace ringreduce::net {

struct Burst {
  static constexpr int kRoundTrips = 16;
  static constexpr Nanos kShortest = 100 * kMillisecond, kLongest = 2 * kSecond;
  static constexpr size_t kMostBytes = 64 << 20;
};

// Sends over a connection; the other end calls `receiveBurst`, which returns what came, in Mbit/s.
// `turn` is called every few milliseconds until the other end is there; it throws to give up. Throw
// Error(kSetup) if the connection ends before; what is to be said of the other end is `who`.
void sendBurst(Socket& connection, const std::string& who, const std::function<void()>& turn);
double receiveBurst(Socket& connection, const std::string& who, const std::function<void()>& turn);

// The shortest round trip that the system has seen on a connection; 0 if it does not tell.
Nanos roundTripOf(const Fd& connection);

// Whom a host meets in a round: -1 for nobody.
int partnerOf(int host, int round, int hosts);
constexpr int roundsOf(int hosts) {
  return hosts < 2 ? 0 : hosts - 1 + hosts % 2;
}

}  // namespace ringreduce::net
