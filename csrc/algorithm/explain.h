// Explains the choice of an all-reduce between hosts (choose.h): each candidate with its modelled
// time.
#pragma once

#include <string>
#include <vector>

#include "algorithm/choose.h"

namespace ringreduce {

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
                                   int ranks_on_host, Algorithm wanted, const WireCost& cost);

}  // namespace ringreduce
