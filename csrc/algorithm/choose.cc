// The candidates, each with its modelled time.
#include "algorithm/choose.h"

#include <algorithm>

namespace ringreduce {

Explanation explainStreamAllReduce(size_t bytes, size_t partial_bytes, int world_size,
                                   int ranks_on_host, Algorithm wanted, const WireCost& cost,
                                   AddOrder order) {
  const StreamTimes times(bytes, partial_bytes, world_size, cost);
  const double P = world_size, S = static_cast<double>(bytes), p = ranks_on_host;
  const BruckShape shape = bruckShape(world_size, bruckRadix(world_size, cost));
  // How many flows share a host's wire where all ranks send to all ranks of other hosts.
  const double shared = p * (P - p) / (P - 1);
  Explanation found{
      .choice = chooseStreamAllReduce(bytes, partial_bytes, world_size, wanted, cost, order),
      .candidates = {{Algorithm::kBruck, times.bruck(), static_cast<double>(shape.hops),
                      (P - 1) * S * shared},
                     {Algorithm::kTwoShot, times.twoShot(), 2, 2 * (P - 1) / P * S * shared}},
      .why = {}};
  if (order == AddOrder::kRing)
    found.candidates.push_back({Algorithm::kRing, times.ring(), 2 * (P - 1), times.ringBytes()});
  const bool has_hierarchy = order == AddOrder::kRing && p > 1 && P > p;
  if (has_hierarchy) {
    found.candidates.push_back({Algorithm::kHierarchical, times.hierarchy(ranks_on_host),
                                2 * (P / p - 1), times.hierarchyBytes(ranks_on_host)});
    if (reducesByHosts(bytes, partial_bytes, world_size, ranks_on_host, wanted, cost))
      found.choice = Algorithm::kHierarchical;
  }
  const auto quickest = std::ranges::min_element(found.candidates, {}, &Candidate::seconds);
  if (wanted != Algorithm::kAuto && found.choice == wanted)
    found.why = "asked for";
  else if (found.choice == quickest->algorithm)
    found.why = "the quickest";
  else if (quickest->algorithm == Algorithm::kBruck && P * S > static_cast<double>(kBruckBytes))
    found.why = "bruck would need more memory than it may";
  else if (found.choice == Algorithm::kHierarchical)
    found.why = "ranks copy less through sockets";
  else
    found.why = "the quickest but for what is not to be had";
  return found;
}

}  // namespace ringreduce
