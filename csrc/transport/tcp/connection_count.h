// How many connections a stream should have.
//
// On a short path without loss one is best: more cost system calls.  On a long path a single
// connection is limited by its congestion window: slow start begins with ten packets, and loss
// shrinks the window.  So a stream on a long path starts with a few.  BBR sends at the rate that it
// measures, so those few fill the path.  With any other congestion control, a stream that always
// had data to send doubles its connections as long as that makes it faster; on a short path it goes
// back when it did not.
#pragma once

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>

#include "base/clock.h"

namespace ringreduce::net {

// How many connections to begin with, if the round trip is known beforehand.
int initialConnections(Nanos round_trip);

class ConnectionCount {
 public:
  ConnectionCount(int least, int most) : most_(most), wanted_(least) {}

  // Totals over the connections of a stream.
  struct Sample {
    Nanos time = 0;
    uint64_t sent = 0;         // bytes, ever
    Nanos round_trip = 0;      // the shortest that was seen, of the fastest connection
    uint64_t retransmits = 0;  // packets, ever
    int connections = 0;       // that exist now
    bool bbr = false;          // congestion control that fills the path in spite of loss
  };

  // Returns how many connections the stream should have.  `busy`: it had more to send than its
  // connections took, ever since the last call.
  int look(const Sample& sample, bool busy);
  int wanted() const { return wanted_; }
  // No more can be made.
  void limit(int most) {
    most_ = std::max(1, most);
    wanted_ = std::min(wanted_, most_);
  }
  bool isLongPath() const;
  // The number and its reasons: "8: round trip 50.0 ms, 12 packets lost, 457 Mbit/s; 16 were no
  // faster".
  std::string why() const;

 private:
  int most_;
  int wanted_;
  bool settled_ = false;
  Sample since_;       // the start of this measurement
  double rate_ = 0;    // bytes a second
  int fewer_ = 0;      // connections before the last doubling,
  double before_ = 0;  // and the rate with those
  int no_faster_ = 0;  // a higher number that was tried
  Nanos round_trip_ = 0;
  uint64_t lost_ = 0;
};

// The connections that one transport has beyond the first to each rank.  All transports of a
// process together may have a quarter of its descriptors: the other ranks open as many towards this
// one, and half is left to the program.
class ConnectionBudget {
 public:
  ConnectionBudget() = default;
  ~ConnectionBudget() { taken_in_all_ -= taken_; }
  ConnectionBudget(const ConnectionBudget&) = delete;
  ConnectionBudget& operator=(const ConnectionBudget&) = delete;

  // Takes one if there is one left.
  bool take() {
    if (taken_in_all_++ < most()) {
      ++taken_;
      return true;
    }
    --taken_in_all_;
    return false;
  }

  static int most() {
    rlimit limit{};
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return 0;
    return static_cast<int>(std::min<rlim_t>(limit.rlim_cur / 4, 1 << 20));
  }

 private:
  static inline std::atomic<int> taken_in_all_ = 0;
  int taken_ = 0;
};

}  // namespace ringreduce::net
