// How slow the wires between hosts are, as all ranks of a group agree on it: of what each has been
// told or has seen, the slowest.  It sets the chooser's cost model (algorithm/choose.h).
//
// RINGREDUCE_ROUND_TRIP_MS and RINGREDUCE_BANDWIDTH_MBIT say it; else the round trip is that of the
// control ring's connections, which the system knows, and the bandwidth what
// RINGREDUCE_RING=measure found, if anything.
#pragma once

#include <cstdint>
#include <string>

#include "algorithm/choose.h"
#include "base/clock.h"

namespace ringreduce {

class Slowness {
 public:
  // What the environment says; throws Error(kSetup).
  static Slowness fromEnvironment();

  // What is seen, where nothing was said.
  void seeRoundTrip(Nanos round_trip);
  void seeBandwidth(double mbit);

  // For another rank, and what another says: the slower of both holds.
  std::string text() const;
  void take(const std::string& text);

  void putInto(WireCost& cost) const;

 private:
  // Whole numbers, so that all ranks have the very same; 0: nothing is known.
  uint64_t round_trip_ = 0;  // ns
  uint64_t byte_ = 0;        // 1e-15 s
  bool told_round_trip_ = false, told_bandwidth_ = false;
};

}  // namespace ringreduce
