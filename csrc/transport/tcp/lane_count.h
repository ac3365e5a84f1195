// How many connections a stream should have.
//
// One, where nothing is lost and the way is short: more would cost system calls.  On a long way a
// single connection is held back by its congestion window: slow start from ten packets, and, where
// packets are lost, all that its congestion control makes of that.  So there a stream has a few
// from the start.  Where congestion control is BBR, which sends at the rate that it measures, these
// fill the way, and more would only get into each other's way.
// With any other, a stream that has had data to send all the time opens more, twice as many each
// time, as long as that makes it faster; nearby it goes back to the fewer where it did not.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "base/clock.h"

namespace ringreduce::net {

// How many connections to begin with on a way of this round trip, where it is known beforehand.
int lanesAtFirst(Nanos round_trip);

class LaneCount {
 public:
  LaneCount(int least, int most) : least_(least), most_(most), wanted_(least) {}

  // What the connections of a stream have been through, all together.
  struct Sample {
    Nanos time = 0;
    uint64_t sent = 0;         // bytes, ever
    Nanos round_trip = 0;      // the least that was seen; of the fastest connection
    uint64_t retransmits = 0;  // packets, ever
    int lanes = 0;             // that there are now
    bool fills = false;        // their congestion control does, whatever is lost: it is BBR
  };

  // Looks again at a stream that has had more to send than its connections took ever since the last
  // call (`busy`), and returns how many it should have.
  int look(const Sample& sample, bool busy);
  int wanted() const { return wanted_; }
  // No more can be had.
  void limit(int most) {
    most_ = std::max(1, most);
    wanted_ = std::min(wanted_, most_);
  }
  bool isLongWay() const;
  // Why there are that many: "8: round trip 50.0 ms, 12 packets lost, 457 Mbit/s; 16 were no
  // faster".
  std::string why() const;

 private:
  const int least_;
  int most_;
  int wanted_;
  bool settled_ = false;
  Sample since_;       // the start of this measurement
  double rate_ = 0;    // bytes a second
  int fewer_ = 0;      // connections that there were before,
  double before_ = 0;  // and the rate with those
  int no_faster_ = 0;  // more that have been tried
  Nanos round_trip_ = 0;
  uint64_t lost_ = 0;
};

}  // namespace ringreduce::net
