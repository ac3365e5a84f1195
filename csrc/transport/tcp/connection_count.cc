// The rule: measure, double, go back, settle.
#include "transport/tcp/connection_count.h"

#include <algorithm>
#include <cstdio>

namespace ringreduce::net {
namespace {

// One connection fills a path with a shorter round trip, if nothing is lost.
constexpr Nanos kLongPath = 2 * kMillisecond;
// Connections on a long path: slow start needs a round trip for each doubling.  BBR needs fewer.
constexpr int kAtFirst = 8, kAtFirstWithBbr = 4;
constexpr double kWorthwhile = 1.15;

}  // namespace

int initialConnections(Nanos round_trip) {
  return round_trip > kLongPath ? kAtFirstWithBbr : 1;
}

int ConnectionCount::look(const Sample& sample, bool busy) {
  if (!busy || sample.connections < wanted_ || since_.time == 0) {
    since_ = sample;
    return wanted_;
  }
  const Nanos measured = sample.time - since_.time;
  round_trip_ = sample.round_trip;
  const int first = std::min(sample.bbr ? kAtFirstWithBbr : kAtFirst, most_);
  if (isLongPath() && wanted_ < first) {
    since_ = sample;
    return wanted_ = first;
  }
  if (measured < std::max<Nanos>(50 * kMillisecond, 4 * round_trip_)) return wanted_;
  rate_ = static_cast<double>(sample.sent - since_.sent) / static_cast<double>(measured) * 1e9;
  lost_ += sample.retransmits - since_.retransmits;
  since_ = sample;
  if (settled_ || wanted_ == most_ || sample.bbr || (!isLongPath() && lost_ == 0)) return wanted_;
  if (rate_ < before_ * kWorthwhile) {
    settled_ = true;
    // On a short path surplus connections only cost system calls.  On a long path they do no harm,
    // and one measurement says little while windows open and close.
    if (isLongPath()) return wanted_;
    no_faster_ = wanted_;
    rate_ = before_;
    return wanted_ = fewer_;
  }
  before_ = rate_;
  fewer_ = wanted_;
  return wanted_ = std::min(2 * wanted_, most_);
}

bool ConnectionCount::isLongPath() const {
  return round_trip_ > kLongPath;
}

std::string ConnectionCount::why() const {
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
