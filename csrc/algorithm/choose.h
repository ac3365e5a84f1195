// Chooses the algorithm of an all-reduce, and holds the cost model behind the choice.  Who asks:
// collectives/all_reduce.cc, and before it group/wires.cc (Hierarchy::takes) between hosts.
//
// Inside a host every byte goes through the caches, so cost is counted in passes over the message:
// bytes that one rank reads and writes, for a message of S bytes and P ranks.
//
//   direct   copy in (S read, S written), add all P inputs (P S read, S written); one wait a slice
//   twoshot  copy in the others' parts, add one's own part of all inputs, share it, copy out the
//            others' parts: about (3 - 2/P) S read and (3 - 2/P) S written; two waits a slice
//   ring     every byte moves through 2 (P-1) slots of 1/P of the message; 2 (P-1) waits a slice
//
// A wait costs the transfer of a cache line between cores, or a context switch where ranks
// outnumber cores. So direct wins where waits dominate (small messages) and always for two ranks,
// whose extra pass is half a message; twoshot wins for larger messages of three and more ranks.
// ring is there for comparison; benchmarks/core_perf.cc measures all three.
//
// Between hosts cost is time: that of a hop, of a message, of a byte (WireCost).
//
//   bruck    every rank gathers all inputs, in log P hops, and adds them: (P-1) S bytes
//   direct   the same in one hop, with P-1 messages
//   twoshot  each rank sends the owners their parts, adds its own part, and sends the sum to all:
//            two hops, 2 (P-1)/P S bytes, in P-1 flows that meet at each rank
//   ring     as many bytes, to one neighbour and from one: 2 (P-1) hops
//
// Where H hosts hold p ranks each:
//
//   hierarchical   each host adds through shared memory, then rings between the hosts add: 2 (H-1)
//                  hops, and 2 (H-1)/H S bytes on a host's wire
//
// In the order of ranks (algorithm/cut.h) ring and hierarchical cannot add, and are not chosen.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "algorithm/cut.h"
#include "base/op_signature.h"

namespace ringreduce {

enum class Algorithm : uint8_t { kAuto, kDirect, kTwoShot, kRing, kBruck, kHierarchical };
inline constexpr auto kNoAlgorithm = static_cast<Algorithm>(0xff);  // no algorithm
inline constexpr const char* kAlgorithmNames[] = {"auto", "direct", "twoshot",
                                                  "ring", "bruck",  "hierarchical"};
// How an operation ran, for its record.
struct Way {
  Algorithm algorithm = kNoAlgorithm;  // of an all-reduce
  bool in_place = false;               // in tensors that the ranks share
};
// Whether it can add in the order of ranks.
constexpr bool addsByRank(Algorithm algorithm) {
  return algorithm != Algorithm::kRing && algorithm != Algorithm::kHierarchical;
}

constexpr std::optional<Algorithm> algorithmNamed(std::string_view name) {
  for (uint8_t i = 0; i < std::size(kAlgorithmNames); ++i)
    if (name == kAlgorithmNames[i]) return static_cast<Algorithm>(i);
  return std::nullopt;
}

// From this size on three and more ranks divide the addition.
inline constexpr size_t kTwoShotBytes = 32 << 10;

// Inside a host: one of the first three.  `wanted` is the user's choice; algorithms for sockets do
// not apply to ranks that share memory.
constexpr Algorithm chooseAllReduce(size_t bytes, int world_size, Algorithm wanted) {
  if (wanted != Algorithm::kAuto && wanted < Algorithm::kBruck) return wanted;
  if (world_size > 2 && bytes >= kTwoShotBytes) return Algorithm::kTwoShot;
  return Algorithm::kDirect;
}

// ---- between hosts

// In seconds.  The ranks of a group agree on one when the group is made (group/network.cc).
struct WireCost {
  // The part of a hop that the two systems take; the rest is half of the round trip.
  static constexpr double kSystem = 20e-6;

  double hop = 30e-6;      // from a rank's send to the other's receive
  double message = 8e-6;   // a rank's own time for each message that it sends or gets
  double byte = 1e-9;      // on the wire
  double memory = 0.2e-9;  // to add a byte, or copy it
  double crowd = 0.01;     // extra cost of a byte for each further flow that meets at a rank
  int ranks_on_host = 1;   // the most ranks that share a host's wire

  // The wire alone.
  constexpr double roundTrip() const { return 2 * (hop - kSystem); }
};

// The factor by which a byte costs more if each rank sends to all others, not to its neighbour:
// between hosts of p ranks the ring has p times fewer flows.
constexpr double crowding(int world_size, const WireCost& cost) {
  const double P = world_size, p = cost.ranks_on_host;
  return std::max(1., p * (P - p) / (P - 1)) * (1 + cost.crowd * (P - 2));
}

// Above this much memory for the inputs of all ranks, bruck and direct are not chosen; above the
// second not even if the user asks for them.
inline constexpr size_t kBruckBytes = 4 << 20, kMostBruckBytes = 64 << 20;

// Bruck's all-gather: distances to other ranks in groups of radix - 1, each group a hop.  With
// radix P it is one hop.
struct BruckShape {
  int hops = 0, messages = 0;  // a rank sends, and gets
};
constexpr BruckShape bruckShape(int world_size, int radix) {
  BruckShape shape;
  for (int64_t near = 1; near < world_size; near *= radix, ++shape.hops)
    shape.messages += static_cast<int>(std::min<int64_t>(radix - 1, (world_size - 1) / near));
  return shape;
}
constexpr double bruckOverhead(int world_size, int radix, const WireCost& cost) {
  const BruckShape shape = bruckShape(world_size, radix);
  return shape.hops * cost.hop + shape.messages * cost.message;
}

// The radix with the least overhead; of equal ones the largest.
constexpr int bruckRadix(int world_size, const WireCost& cost) {
  int best = 2;
  for (int radix = 3; radix <= world_size; ++radix)
    if (bruckOverhead(world_size, radix, cost) <= bruckOverhead(world_size, best, cost))
      best = radix;
  return best;
}

// How long an all-reduce takes by each way.  `partial_bytes`: the message's, as partial sums.
struct StreamTimes {
  constexpr StreamTimes(size_t bytes, size_t partial_bytes, int world_size, const WireCost& cost)
      : P(world_size),
        S(static_cast<double>(bytes)),
        partial(static_cast<double>(partial_bytes)),
        cost(cost) {}

  constexpr double bruck() const {
    const int world_size = static_cast<int>(P);
    return bruckOverhead(world_size, bruckRadix(world_size, cost), cost) +
           (P - 1) * S * cost.byte * crowding(world_size, cost) + P * S * cost.memory;
  }
  constexpr double twoShot() const {
    return 2 * (cost.hop + (P - 1) * cost.message) +
           2 * (P - 1) / P * S * cost.byte * crowding(static_cast<int>(P), cost) + S * cost.memory;
  }
  // The first hop carries inputs, P-2 carry partial sums, P-1 the result.
  constexpr double ringBytes() const { return (S + (P - 2) * partial + (P - 1) * S) / P; }
  constexpr double ring() const {
    return 2 * (P - 1) * (cost.hop + cost.message) + ringBytes() * cost.byte + S * cost.memory;
  }
  // For a host, H-1 hops carry its sums, and H-1 the result.
  constexpr double hierarchyBytes(int ranks_on_host) const {
    const double H = P / ranks_on_host;
    return (H - 1) * (partial + S) / H;
  }
  // Inside the host all bytes are copied twice and added once.
  constexpr double hierarchy(int ranks_on_host) const {
    const double p = ranks_on_host, H = P / p;
    return 2 * (H - 1) * (cost.hop + cost.message) + 2 * p * cost.message +
           hierarchyBytes(ranks_on_host) * cost.byte + 2.5 * S * cost.memory;
  }

  double P, S, partial;
  const WireCost& cost;
};

// Of ranks that see no hosts: one of direct, twoshot, ring and bruck.
constexpr Algorithm chooseStreamAllReduce(size_t bytes, size_t partial_bytes, int world_size,
                                          Algorithm wanted, const WireCost& cost,
                                          AddOrder order = AddOrder::kRing) {
  const StreamTimes times(bytes, partial_bytes, world_size, cost);
  const double everything = times.P * times.S;
  const bool gathers = wanted == Algorithm::kBruck || wanted == Algorithm::kDirect;
  if (wanted != Algorithm::kAuto && wanted != Algorithm::kHierarchical &&
      !(gathers && everything > static_cast<double>(kMostBruckBytes)))
    return wanted;
  const bool rings = order == AddOrder::kRing;
  const double bruck = times.bruck(), two_shot = times.twoShot(), ring = times.ring();
  if ((bruck <= ring || !rings) && bruck <= two_shot &&
      everything <= static_cast<double>(kBruckBytes))
    return Algorithm::kBruck;
  if (!rings) return Algorithm::kTwoShot;
  return two_shot < ring && world_size > 2 ? Algorithm::kTwoShot : Algorithm::kRing;
}

// ---- compressed values
//
//   owner    each rank sends each owner its part, coded once; the owner adds, codes the sum once
//            and sends it to all: two-shot, and no error grows with the ranks
//   ring     decode, add and code again at each hop; the coded sum then goes round unchanged: as
//            many bytes, to one neighbour, but an error for each hop

// The time of each schedule.  In both a rank encodes the message once and decodes it twice, which
// costs about as much as adding its bytes.
struct CodedTimes {
  constexpr CodedTimes(size_t bytes, size_t coded_bytes, int world_size, const WireCost& cost)
      : P(world_size),
        S(static_cast<double>(bytes)),
        coded(static_cast<double>(coded_bytes)),
        cost(cost) {}

  constexpr double coding() const { return 3 * S * cost.memory; }
  constexpr double owner() const {
    return 2 * (cost.hop + (P - 1) * cost.message) + coding() +
           2 * (P - 1) / P * coded * cost.byte * crowding(static_cast<int>(P), cost);
  }
  constexpr double ring() const {
    return 2 * (P - 1) * (cost.hop + cost.message) + coding() + 2 * (P - 1) / P * coded * cost.byte;
  }

  double P, S, coded;
  const WireCost& cost;
};

// The ring is chosen only if it saves this part of the time, since it is less accurate.
inline constexpr double kRingSaves = 0.2;

// Between hosts: owner or ring.
constexpr CodedSchedule chooseCoded(size_t bytes, size_t coded_bytes, int world_size,
                                    CodedSchedule wanted, const WireCost& cost) {
  if (wanted != CodedSchedule::kAuto) return wanted;
  const CodedTimes times(bytes, coded_bytes, world_size, cost);
  const bool ring = world_size > 2 && times.ring() < (1 - kRingSaves) * times.owner();
  return ring ? CodedSchedule::kRing : CodedSchedule::kOwner;
}

// Whether several hosts with as many ranks each, at least two, use the hierarchy.
constexpr bool reducesByHosts(size_t bytes, size_t partial_bytes, int world_size, int ranks_on_host,
                              Algorithm wanted, const WireCost& cost) {
  if (wanted != Algorithm::kAuto) return wanted == Algorithm::kHierarchical;
  const StreamTimes times(bytes, partial_bytes, world_size, cost);
  const double other =
      chooseStreamAllReduce(bytes, partial_bytes, world_size, wanted, cost) == Algorithm::kBruck
          ? times.bruck()
          : std::min(times.twoShot(), times.ring());
  // Bytes that go through sockets are copied into the kernel and out of it.
  const double saved = times.ringBytes() - times.hierarchyBytes(ranks_on_host) / ranks_on_host;
  return times.hierarchy(ranks_on_host) < other + saved * 2 * cost.memory;
}

// Whether an all-gather uses the ring; else Bruck's.  `bytes`: of all ranks together.
constexpr bool gathersByRing(size_t bytes, int world_size, const WireCost& cost) {
  const double P = world_size;
  const double wire = static_cast<double>(bytes) * (P - 1) / P * cost.byte;
  return (P - 1) * (cost.hop + cost.message) + wire <
         bruckOverhead(world_size, bruckRadix(world_size, cost), cost) +
             wire * crowding(world_size, cost);
}

// Whether a reduce-scatter uses the ring; else each rank sends each other rank its part.
constexpr bool scattersByRing(size_t bytes, size_t partial_bytes, int world_size,
                              const WireCost& cost) {
  const double P = world_size, S = static_cast<double>(bytes);
  const double on_ring = (S + (P - 2) * static_cast<double>(partial_bytes)) / P;
  return (P - 1) * (cost.hop + cost.message) + on_ring * cost.byte <
         cost.hop + (P - 1) * cost.message +
             (P - 1) / P * S * cost.byte * crowding(world_size, cost);
}

// Whether a reduce is a reduce-scatter on the ring and a gather to the root; else the root gets all
// inputs.
constexpr bool reducesByRing(size_t bytes, size_t partial_bytes, int world_size,
                             const WireCost& cost) {
  const double P = world_size, S = static_cast<double>(bytes);
  const double on_ring = (S + (P - 2) * static_cast<double>(partial_bytes) + (P - 1) * S) / P;
  return P * cost.hop + 2 * (P - 1) * cost.message + on_ring * cost.byte <
         cost.hop + (P - 1) * (cost.message + S * cost.byte);
}

// Whether a broadcast goes down a chain in slices; else down a tree, whose root sends the message
// to log P ranks.
constexpr bool broadcastsByChain(size_t bytes, int world_size, const WireCost& cost) {
  int levels = 0;
  for (int64_t near = 1; near < world_size; near *= 2) ++levels;
  const double S = static_cast<double>(bytes) * cost.byte;
  return (world_size - 1) * (cost.hop + cost.message) + S < levels * (cost.hop + cost.message + S);
}

// ---- why: each candidate between hosts with its modelled time

struct Candidate {
  Algorithm algorithm;
  double seconds;
  double hops;   // one after the other
  double bytes;  // that a host's wire carries each way
};

struct Explanation {
  Algorithm choice;
  std::vector<Candidate> candidates;
  std::string why;
};

// Of `world_size` ranks, as many on each of several hosts.
Explanation explainStreamAllReduce(size_t bytes, size_t partial_bytes, int world_size,
                                   int ranks_on_host, Algorithm wanted, const WireCost& cost,
                                   AddOrder order = AddOrder::kRing);

}  // namespace ringreduce
