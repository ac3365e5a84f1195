// Measuring, doubling, going back, settling.
#include "transport/tcp/lane_count.h"

#include <algorithm>
#include <cstdio>

namespace ringreduce::net {
namespace {

// A shorter way than this, without loss, fills with one connection.
constexpr Nanos kLongWay = 2 * kMillisecond;
// On a long way several from the start: slow start takes a round trip a doubling.  BBR needs fewer.
constexpr int kLongWayLanes = 8, kLongWayLanesOfBbr = 4;
constexpr double kWorthwhile = 1.15;

}  // namespace

int lanesAtFirst(Nanos round_trip) {
  return round_trip > kLongWay ? kLongWayLanesOfBbr : 1;
}

int LaneCount::look(const Sample& sample, bool busy) {
  if (!busy || sample.lanes < wanted_ || since_.time == 0) {
    since_ = sample;
    return wanted_;
  }
  const Nanos measured = sample.time - since_.time;
  round_trip_ = sample.round_trip;
  const int first = std::min(sample.fills ? kLongWayLanesOfBbr : kLongWayLanes, most_);
  if (isLongWay() && wanted_ < first) {
    since_ = sample;
    return wanted_ = first;
  }
  if (measured < std::max<Nanos>(50 * kMillisecond, 4 * round_trip_)) return wanted_;
  rate_ = static_cast<double>(sample.sent - since_.sent) / static_cast<double>(measured) * 1e9;
  lost_ += sample.retransmits - since_.retransmits;
  since_ = sample;
  if (settled_ || wanted_ == most_ || sample.fills || (!isLongWay() && lost_ == 0)) return wanted_;
  if (rate_ < before_ * kWorthwhile) {
    settled_ = true;
    // Nearby more of them only cost system calls.  On a long way, where one measurement says little
    // while windows open and close, they do no harm.
    if (isLongWay()) return wanted_;
    no_faster_ = wanted_;
    rate_ = before_;
    return wanted_ = fewer_;
  }
  before_ = rate_;
  fewer_ = wanted_;
  return wanted_ = std::min(2 * wanted_, most_);
}

bool LaneCount::isLongWay() const {
  return round_trip_ > kLongWay;
}

std::string LaneCount::why() const {
  char text[160];
  int length =
      std::snprintf(text, sizeof text, "%d: round trip %.1f ms, %llu packets lost, %.0f Mbit/s",
                    wanted_, static_cast<double>(round_trip_) / kMillisecond,
                    static_cast<unsigned long long>(lost_), rate_ * 8e-6);
  if (no_faster_ > 0)
    std::snprintf(text + length, sizeof text - static_cast<size_t>(length), "; %d were no faster",
                  no_faster_);
  return text;
}

}  // namespace ringreduce::net
