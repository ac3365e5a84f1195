// From the environment, to and from eight bytes each, and into seconds.
#include "bootstrap/slowness.h"

#include <algorithm>

#include "base/config.h"

namespace ringreduce {

Slowness Slowness::fromEnvironment() {
  Slowness slowness;
  const Config config = Config::read();
  const double round_trip = config.round_trip_ms.get(), mbit = config.bandwidth_mbit.get();
  slowness.seeRoundTrip(static_cast<Nanos>(round_trip * static_cast<double>(kMillisecond)));
  slowness.seeBandwidth(mbit);
  slowness.told_round_trip_ = slowness.round_trip_ > 0;
  slowness.told_bandwidth_ = slowness.byte_ > 0;
  return slowness;
}

void Slowness::seeRoundTrip(Nanos round_trip) {
  if (!told_round_trip_ && round_trip > 0) round_trip_ = static_cast<uint64_t>(round_trip);
}

void Slowness::seeBandwidth(double mbit) {
  if (!told_bandwidth_ && mbit > 0) byte_ = static_cast<uint64_t>(8e9 / mbit);
}

std::string Slowness::text() const {
  std::string text;
  for (const uint64_t number : {round_trip_, byte_})
    for (int byte = 0; byte < 8; ++byte) text += static_cast<char>(number >> (8 * byte) & 0xff);
  return text;
}

void Slowness::take(const std::string& text) {
  const auto numberAt = [&](size_t at) {
    uint64_t number = 0;
    for (size_t byte = 0; byte < 8; ++byte)
      number |= static_cast<uint64_t>(static_cast<unsigned char>(text[at + byte])) << (8 * byte);
    return number;
  };
  round_trip_ = std::max(round_trip_, numberAt(0));
  byte_ = std::max(byte_, numberAt(8));
}

void Slowness::putInto(WireCost& cost) const {
  if (round_trip_ > 0) cost.hop = WireCost::kSystem + static_cast<double>(round_trip_) * 0.5e-9;
  if (byte_ > 0) cost.byte = static_cast<double>(byte_) * 1e-15;
}

}  // namespace ringreduce
