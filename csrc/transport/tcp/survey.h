// Measuring the bandwidth between two hosts: one end sends for a short time, and the other counts
// what arrives.  One direction at a time: if both are full, acknowledgements queue behind data.
//
// Hosts measure in pairs, in rounds in which each host has at most one partner, so that no host's
// line is shared by two measurements.  All pairs of H hosts take H-1 rounds, or H.
//
// The result is the rate of the second half of what arrived; during the first half TCP finds out
// what the line carries.  That takes some round trips, so a burst lasts kRoundTrips of them, at
// most kLongest and kMostBytes.
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

// Sends over a connection; the other end calls `receiveBurst`, which returns the rate in Mbit/s.
// `turn` is called every few milliseconds until the other end is ready; it throws to give up. Throw
// Error(kSetup) if the connection ends before.  `who` names the other end in errors.
void sendBurst(Socket& connection, const std::string& who, const std::function<void()>& turn);
double receiveBurst(Socket& connection, const std::string& who, const std::function<void()>& turn);

// The shortest round trip that the kernel has seen on a connection; 0 if it is unknown.
Nanos roundTripOf(const Fd& connection);

// A host's partner in a round; -1 if it has none.
int partnerOf(int host, int round, int hosts);
constexpr int roundsOf(int hosts) {
  return hosts < 2 ? 0 : hosts - 1 + hosts % 2;
}

}  // namespace ringreduce::net
