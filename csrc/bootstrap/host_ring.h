// In which order a group's ranks form rings between hosts (RINGREDUCE_RING):
//
//     unset          that of the ranks
//     0,2,1,3        that of these hosts, numbered by their lowest ranks, or of these ranks
//     measure        that whose slowest link is the fastest (algorithm/ring_order.h), by rates that
//     are
//                    measured while the group is made (transport/tcp/survey.h)
//
// Ranks of one host stay beside each other.  All ranks have the same order: what they were told is
// compared, and what is measured is decided by rank 0.
//
// The order is that of addition, too: a rank's place in it is what algorithm/cut.h calls its
// number.
#pragma once

#include <string>
#include <vector>

#include "algorithm/ring_order.h"
#include "bootstrap/hosts.h"
#include "bootstrap/options.h"

namespace ringreduce {

struct RingWish {
  bool measure = false;
  std::vector<int> order;  // empty: that of the ranks
  // Throws Error(kSetup) for what cannot be read.
  static RingWish fromText(const std::string& text);
};

struct HostRing {
  enum class Source : uint8_t { kRanks, kGiven, kMeasured };
  Source source = Source::kRanks;
  std::vector<int> hosts;       // in the ring's order
  std::vector<int> ranks = {};  // the same; empty where it is that of their numbers
  Rates mbit = {};              // as measured, from host to host; else empty

  // What is to be, but for what is measured.  Throws Error(kSetup) for an order of other hosts or
  // ranks, but where the group is a part of a larger one, which it may be meant for.
  static HostRing of(const Hosts& hosts, const RingWish& wish, const GroupOptions& options);
  // By rates.  Another order than the hosts' own must be worth it: rates differ from time to time,
  // and so would results in their last bits.
  static HostRing measured(const Hosts& hosts, const Rates& mbit);

  // Of what was measured, for the store.
  std::string toText() const;
  static HostRing fromText(const Hosts& hosts, const std::string& text);
  // For the log.
  std::string told(const Hosts& hosts) const;

  // By how much the slowest link must be faster.
  static constexpr double kWorth = 1.1;
};

}  // namespace ringreduce
