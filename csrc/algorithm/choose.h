// Chooses the algorithm of every call of the CPU, and holds the cost model behind the choice:
// `choose` is the one place that decides.  Its table (choose.cc) has a row for each kind of call
// and algorithm.  Collectives run what it says, `--explain` prints it, the planner asks it.
//
// All that is decided on a call, in this order:
//
//   GPU tensors     not here.  GpuCommunicator::performs says whether there are kernels for the
//                   call (torch/gpu_calls.cc), and cuda/kernels/gpu_tuning.h chooses one.
//   exact or coded  what the hook was given; codec="auto" measures (group/compression.h)
//   in place        where all ranks have the tensors in shared blocks: `inPlace`
//                   (collectives/collectives.h), whatever the algorithm
//   hierarchy       between hosts.  `choose` is asked with it among the candidates; a coded
//                   all_reduce takes it unless the user named another (`Hierarchy::run`).
//   algorithm       `choose`.  What a user names counts for all_reduce, where it can be had.  The
//                   other two kinds with a hierarchy take it always if the user names it, by its
//                   cost if nothing is named, and else never.
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
// Between hosts cost is time: that of a hop, of a message, of a byte (WireCost).  All-reduces:
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
//                  hops, and 2 (H-1)/H S bytes on a host's line; half of both for the other two
//                  kinds that have it
//
// Of compressed values:
//
//   owner    each rank sends each owner its part, coded once; the owner adds, codes the sum once
//            and sends it to all: two-shot, and no error grows with the ranks
//   ring     decode, add and code again at each hop; the coded sum then goes round unchanged: as
//            many bytes, to one neighbour, but an error for each hop
//
// The other kinds: an all-gather by bruck, ring or hierarchical; a reduce-scatter by twoshot (each
// rank sends each other its part), ring or hierarchical; a reduce by direct (the root gets all
// inputs) or ring (a reduce-scatter, and a gather to the root); a broadcast down a tree or, in
// slices, down a chain.
//
// In the order of ranks (algorithm/cut.h) ring and hierarchical cannot add, and are not chosen for
// exact calls that add.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <span>
#include <string_view>

#include "algorithm/cut.h"
#include "base/op_signature.h"

namespace ringreduce {

enum class Algorithm : uint8_t {
  kAuto,
  kDirect,
  kTwoShot,
  kRing,
  kBruck,
  kHierarchical,
  kOwner,
  kTree,
  kChain
};
inline constexpr auto kNoAlgorithm = static_cast<Algorithm>(0xff);  // no algorithm
inline constexpr const char* kAlgorithmNames[] = {
    "auto", "direct", "twoshot", "ring", "bruck", "hierarchical", "owner", "tree", "chain"};
// The first of them, which a user can ask for: those of all-reduces.
inline constexpr size_t kUsersAlgorithms = 6;
// How an operation ran, for its record.
struct Way {
  Algorithm algorithm = kNoAlgorithm;  // of an all-reduce, or by the hierarchy
  bool in_place = false;               // in tensors that the ranks share
};
// Whether it can add in the order of ranks.
constexpr bool addsByRank(Algorithm algorithm) {
  return algorithm != Algorithm::kRing && algorithm != Algorithm::kHierarchical;
}

// One that a user can ask for.
constexpr std::optional<Algorithm> algorithmNamed(std::string_view name) {
  for (uint8_t i = 0; i < kUsersAlgorithms; ++i)
    if (name == kAlgorithmNames[i]) return static_cast<Algorithm>(i);
  return std::nullopt;
}

// In seconds.  The ranks of a group agree on one when the group is made (epoch/network.cc).
struct WireCost {
  // The part of a hop that the two systems take; the rest is half of the round trip.
  static constexpr double kSystem = 20e-6;

  double hop = 30e-6;     // from a rank's send to the other's receive
  double message = 8e-6;  // a rank's own time for each message that it sends or gets
  double byte = 1e-9;     // on the line
  // The same as calls have measured it since the group was made (agreed_line.h); 0: not yet.  It
  // counts where it changes no bit of a result: not for the hierarchy and not for coded calls.
  double measured = 0;
  double memory = 0.2e-9;  // to add a byte, or copy it
  double crowd = 0.01;     // extra cost of a byte for each further flow that meets at a rank
  int ranks_on_host = 1;   // the most ranks that share a host's line

  // The line alone.
  constexpr double roundTrip() const { return 2 * (hop - kSystem); }
};

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

// ---- the choice

// What a choice needs to know of a call.
struct CallSize {
  Kind kind;
  size_t bytes;                         // of the whole message
  size_t partial_bytes = 0;             // the same as partial sums, where it adds
  size_t coded_bytes = 0;               // the same as coded, of kCompressedAllReduce
  Algorithm wanted = Algorithm::kAuto;  // the user's; what cannot be had does not count
};

// The ranks that take part.
struct GroupShape {
  int ranks;
  int ranks_on_host = 1;   // above 1: so many on each of several hosts, which can use the hierarchy
  bool in_memory = false;  // all share memory
  AddOrder order = AddOrder::kRing;
};

// What is known of an algorithm that a call could take.
struct Candidate {
  Algorithm algorithm = Algorithm::kAuto;
  double seconds = 0;
  double hops = 0;      // one after the other
  double messages = 0;  // that a rank sends
  double bytes = 0;     // that a host's line carries each way
};

struct AlgorithmChoice {
  static constexpr size_t kMost = 5;

  std::span<const Candidate> candidates() const { return {all.data(), count}; }

  Candidate taken;  // inside a host, whose cost is no time, only its algorithm is known
  const char* why;
  size_t count = 0;  // of the candidates, none inside a host
  std::array<Candidate, kMost> all;
};

// Of two ranks or more.  Pure: ranks that know the same choose the same.  For a kind of call that
// has one algorithm only, kNoAlgorithm.
AlgorithmChoice choose(const CallSize& call, const GroupShape& shape, const WireCost& cost);

}  // namespace ringreduce
