// The table of algorithms by kind of call, and the choice among them.
#include "algorithm/choose.h"

namespace ringreduce {

namespace {

// Inside a host three and more ranks divide the addition from this size on.
constexpr size_t kTwoShotBytes = 32 << 10;
// Above this much memory for the inputs of all ranks, bruck and direct are not chosen; above the
// second not even if the user asks for them.
constexpr double kBruckBytes = 4 << 20, kMostBruckBytes = 64 << 20;
// The coded ring is chosen only if it saves this part of the time, since it is less accurate.
constexpr double kRingSaves = 0.2;

// What an algorithm does, one after the other.
struct Steps {
  double hops, messages;
  double bytes;         // that a rank sends
  double memory = 0;    // bytes that it adds, codes or copies
  bool to_all = false;  // each rank sends to all others, not to its neighbour
};

// A call, in the letters of the formulas.
struct Case {
  Case(const CallSize& call, const GroupShape& shape, const WireCost& cost)
      : P(shape.ranks),
        p(shape.ranks_on_host),
        H(P / p),
        S(static_cast<double>(call.bytes)),
        partial(static_cast<double>(call.partial_bytes)),
        coded(static_cast<double>(call.coded_bytes)),
        cost(cost) {}

  // Each rank gets all blocks, `bytes` of them from others.
  Steps byBruck(double bytes, double memory) const {
    const int ranks = static_cast<int>(P);
    const BruckShape bruck = bruckShape(ranks, bruckRadix(ranks, cost));
    return {static_cast<double>(bruck.hops), static_cast<double>(bruck.messages), bytes, memory,
            true};
  }
  // Hops that carry inputs, partial sums, and results, a P-th of the message each.
  double onRing(double inputs, double sums, double results) const {
    return (inputs * S + sums * partial + results * S) / P;
  }
  // By the ring through all ranks, and on a host's line by the hierarchy.
  double ringBytes(Kind kind) const {
    if (kind == Kind::kAllGather) return (P - 1) / P * S;
    return onRing(1, P - 2, kind == Kind::kAllReduce ? P - 1 : 0);
  }
  double hierarchyBytes(Kind kind) const {
    const double sums = kind == Kind::kAllGather ? 0 : partial;
    return (H - 1) / H * (sums + (kind == Kind::kReduceScatter ? 0 : S));
  }

  // The factor by which a byte costs more if each rank sends to all others: between hosts of p
  // ranks the ring has p times fewer flows, and flows that meet cost more.
  double crowding() const {
    const double most = cost.ranks_on_host;
    return std::max(1., most * (P - most) / (P - 1)) * (1 + cost.crowd * (P - 2));
  }
  double seconds(const Steps& s) const {
    return s.hops * cost.hop + s.messages * cost.message +
           s.bytes * cost.byte * (s.to_all ? crowding() : 1) + s.memory * cost.memory;
  }
  // How many flows share a host's line where all ranks send to all ranks of other hosts.
  double shared(const Steps& s) const { return s.to_all ? p * (P - p) / (P - 1) : 1; }

  const double P, p, H, S, partial, coded;
  const WireCost& cost;
};

struct Row {
  Kind kind;
  Algorithm algorithm;
  Steps (*steps)(const Case&);
};

// Of equal ones the first is taken.
constexpr Row kRows[] = {
    {Kind::kAllReduce, Algorithm::kBruck,
     [](const Case& c) { return c.byBruck((c.P - 1) * c.S, c.P * c.S); }},
    {Kind::kAllReduce, Algorithm::kDirect,  // only for a user who asks for it
     [](const Case& c) { return Steps{1, c.P - 1, (c.P - 1) * c.S, c.P * c.S, true}; }},
    {Kind::kAllReduce, Algorithm::kRing,
     [](const Case& c) {
       return Steps{2 * (c.P - 1), 2 * (c.P - 1), c.onRing(1, c.P - 2, c.P - 1), c.S};
     }},
    {Kind::kAllReduce, Algorithm::kTwoShot,
     [](const Case& c) { return Steps{2, 2 * (c.P - 1), 2 * (c.P - 1) / c.P * c.S, c.S, true}; }},
    // H-1 hops carry the host's sums, and H-1 the result.  Inside the host all bytes are copied
    // twice and added once.
    {Kind::kAllReduce, Algorithm::kHierarchical,
     [](const Case& c) {
       return Steps{2 * (c.H - 1), 2 * (c.H - 1) + 2 * c.p, c.hierarchyBytes(Kind::kAllReduce),
                    2.5 * c.S};
     }},

    // A rank encodes the message once and decodes it twice, each about as dear as adding it.
    {Kind::kCompressedAllReduce, Algorithm::kOwner,
     [](const Case& c) {
       return Steps{2, 2 * (c.P - 1), 2 * (c.P - 1) / c.P * c.coded, 3 * c.S, true};
     }},
    {Kind::kCompressedAllReduce, Algorithm::kRing,
     [](const Case& c) {
       return Steps{2 * (c.P - 1), 2 * (c.P - 1), 2 * (c.P - 1) / c.P * c.coded, 3 * c.S};
     }},

    {Kind::kAllGather, Algorithm::kBruck,
     [](const Case& c) { return c.byBruck((c.P - 1) / c.P * c.S, 0); }},
    {Kind::kAllGather, Algorithm::kRing,
     [](const Case& c) { return Steps{c.P - 1, c.P - 1, (c.P - 1) / c.P * c.S}; }},

    // Each rank of a host has an H-th of the message for each host, which it copies to the others.
    {Kind::kAllGather, Algorithm::kHierarchical,
     [](const Case& c) {
       return Steps{c.H - 1, c.H - 1 + 2 * c.H, c.hierarchyBytes(Kind::kAllGather),
                    c.S + c.S / c.p};
     }},

    {Kind::kReduceScatter, Algorithm::kTwoShot,
     [](const Case& c) { return Steps{1, c.P - 1, (c.P - 1) / c.P * c.S, 0, true}; }},
    {Kind::kReduceScatter, Algorithm::kRing,
     [](const Case& c) { return Steps{c.P - 1, c.P - 1, c.onRing(1, c.P - 2, 0)}; }},
    {Kind::kReduceScatter, Algorithm::kHierarchical,
     [](const Case& c) {
       return Steps{c.H - 1, c.H - 1 + 2 * c.H, c.hierarchyBytes(Kind::kReduceScatter), 1.5 * c.S};
     }},

    {Kind::kReduce, Algorithm::kDirect,
     [](const Case& c) { return Steps{1, c.P - 1, (c.P - 1) * c.S}; }},
    {Kind::kReduce, Algorithm::kRing,
     [](const Case& c) { return Steps{c.P, 2 * (c.P - 1), c.onRing(1, c.P - 2, c.P - 1)}; }},

    {Kind::kBroadcast, Algorithm::kTree,  // whose root sends the message to log P ranks
     [](const Case& c) {
       const double levels = bruckShape(static_cast<int>(c.P), 2).hops;
       return Steps{levels, levels, levels * c.S};
     }},
    {Kind::kBroadcast, Algorithm::kChain,
     [](const Case& c) { return Steps{c.P - 1, c.P - 1, c.S}; }},
};

AlgorithmChoice chooseInMemory(const CallSize& call, int ranks) {
  const bool reduces = call.kind == Kind::kAllReduce;
  if (!reduces && call.kind != Kind::kReduce) return {{kNoAlgorithm}, "there is one only", 0, {}};
  // Algorithms for sockets do not apply to ranks that share memory, and the ring would carry the
  // whole message of a reduce to all ranks.
  if (reduces && call.wanted != Algorithm::kAuto && call.wanted < Algorithm::kBruck)
    return {{call.wanted}, "asked for", 0, {}};
  if (ranks > 2 && call.bytes >= kTwoShotBytes)
    return {{Algorithm::kTwoShot}, "shares the addition out", 0, {}};
  return {{Algorithm::kDirect},
          ranks == 2 ? "two ranks: one wait a slice" : "small: one wait a slice",
          0,
          {}};
}

// Whether that algorithm exists for these ranks.
bool exists(Algorithm algorithm, const CallSize& call, const GroupShape& shape) {
  const bool adds = call.kind == Kind::kAllReduce || call.kind == Kind::kReduce ||
                    call.kind == Kind::kReduceScatter;
  if (adds && shape.order == AddOrder::kRank && !addsByRank(algorithm)) return false;
  if (algorithm == Algorithm::kDirect && call.kind == Kind::kAllReduce)
    return call.wanted == Algorithm::kDirect;
  return algorithm != Algorithm::kHierarchical ||
         (shape.ranks_on_host > 1 && shape.ranks > shape.ranks_on_host);
}

// Whether it may be taken.
bool fits(Algorithm algorithm, const CallSize& call, const Case& c) {
  const bool asked = algorithm == call.wanted;
  if (algorithm == Algorithm::kHierarchical) return asked || call.wanted == Algorithm::kAuto;
  const bool gathers = call.kind == Kind::kAllReduce &&
                       (algorithm == Algorithm::kBruck || algorithm == Algorithm::kDirect);
  return !gathers || c.P * c.S <= (asked ? kMostBruckBytes : kBruckBytes);
}

// The seconds by which it is compared.
double weighed(const Candidate& one, const CallSize& call, const Case& c) {
  // Bytes that go through sockets are copied into the kernel and out of it.
  if (one.algorithm == Algorithm::kHierarchical) {
    const double saved = c.ringBytes(call.kind) - c.hierarchyBytes(call.kind) / c.p;
    return one.seconds - saved * 2 * c.cost.memory;
  }
  if (call.kind == Kind::kCompressedAllReduce && one.algorithm == Algorithm::kRing)
    return one.seconds / (1 - kRingSaves);
  return one.seconds;
}

const char* whyTaken(const AlgorithmChoice& choice, const CallSize& call, const Case& c) {
  const Algorithm taken = choice.taken.algorithm;
  if (taken == call.wanted) return "asked for";
  const auto quickest = std::ranges::min_element(choice.candidates(), {}, &Candidate::seconds);
  if (taken == quickest->algorithm) return "the quickest";
  if (quickest->algorithm == Algorithm::kBruck && !fits(Algorithm::kBruck, call, c))
    return "bruck would need more memory than it may";
  if (taken == Algorithm::kHierarchical) return "ranks copy less through sockets";
  return "the quickest but for what is not to be had";
}

}  // namespace

AlgorithmChoice choose(const CallSize& call, const GroupShape& shape, const WireCost& cost) {
  if (shape.in_memory) return chooseInMemory(call, shape.ranks);
  if (cost.measured > 0) {
    WireCost known = cost;
    known.measured = 0;
    const AlgorithmChoice first = choose(call, shape, known);
    if (call.kind == Kind::kCompressedAllReduce ||
        first.taken.algorithm == Algorithm::kHierarchical)
      return first;
    known.byte = cost.measured;
    GroupShape flat = shape;
    flat.ranks_on_host = 1;
    return choose(call, flat, known);
  }
  const Case c(call, shape, cost);
  AlgorithmChoice choice{
      .taken = {kNoAlgorithm}, .why = "there is one only", .count = 0, .all = {}};
  double least = 0;
  bool found = false, asked = false;
  for (const Row& row : kRows) {
    if (row.kind != call.kind || !exists(row.algorithm, call, shape)) continue;
    const Steps steps = row.steps(c);
    const Candidate& one = choice.all[choice.count++] = {
        row.algorithm, c.seconds(steps), steps.hops, steps.messages, steps.bytes * c.shared(steps)};
    const double time = weighed(one, call, c);
    if (asked || !fits(one.algorithm, call, c)) continue;
    asked = one.algorithm == call.wanted;
    if (found && !asked && time >= least) continue;
    found = true;
    least = time;
    choice.taken = one;
  }
  if (found) choice.why = whyTaken(choice, call, c);
  return choice;
}

}  // namespace ringreduce
