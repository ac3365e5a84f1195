// The lines between hosts: what each does to the packets that go over it, and what is on its way.
#pragma once

#include <chrono>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "wan_packet.h"

namespace wan {

using Nanos = int64_t;

inline Nanos now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// One direction between two hosts.
struct Link {
  Nanos delay = 0;
  double bits_per_nano = 0;  // 0: no limit
  double loss = 0;           // of packets
  Nanos queue = 0;           // a packet that would wait for longer is dropped
  bool cut = false;

  Nanos last_due = 0;                                        // nothing overtakes
  int64_t until_loss = std::numeric_limits<int64_t>::max();  // packets that come through first

  int64_t packets = 0, bytes = 0, lost = 0, overflowed = 0, dropped_by_cut = 0;
};

class Network {
 public:
  // `shared`: what a host sends goes over one line, whoever gets it; else each pair has a line.
  Network(int hosts, const Link& each, uint64_t seed, bool shared);

  int hosts() const { return hosts_; }
  Link& link(int from, int to) { return links_[static_cast<size_t>(from * hosts_ + to)]; }
  // To be called after a link's loss was set.
  void drawLoss(Link& link);

  // Takes a packet, or a run of them, that host `from` has sent.
  void take(int from, int to, const Run& run);

  // The next piece that is due by `time` and where it goes; none: -1.
  struct Delivery {
    int to = -1;
    Piece piece;
  };
  Delivery due(Nanos time);
  // When the next piece is due; 0 if none is on its way.
  Nanos nextDue() const { return waiting_.empty() ? 0 : waiting_.front().due; }

  std::string statistics() const;  // as one line of JSON

 private:
  struct Waiting {
    Nanos due;
    uint64_t order;  // keeps those of one instant in sequence
    Link* link;
    int to;
    int64_t packets;
    Piece piece;
  };
  static bool later(const Waiting& a, const Waiting& b) {
    return a.due != b.due ? a.due > b.due : a.order > b.order;
  }

  int hosts_;
  bool shared_;
  std::vector<Link> links_;
  std::vector<Nanos> free_at_;    // when each line is idle again
  std::vector<Waiting> waiting_;  // a heap, the earliest first
  std::mt19937_64 random_;
  uint64_t order_ = 0;
  int64_t deliveries_ = 0, lateness_ = 0, latest_ = 0;
};

}  // namespace wan
