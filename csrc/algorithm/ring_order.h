// Orders hosts in a ring so that its slowest link is as fast as possible.
//
// A ring moves as many bytes over each of its links, so it is as fast as the slowest.  Lines
// between data centres differ, and so may the two directions of a line: `rates[a][b]` is the rate
// from a to b.  This is the bottleneck travelling salesman problem, solved exactly for up to
// kExactHosts, and by search for more.
#pragma once

#include <vector>

namespace ringreduce {

// Square, by host; the diagonal does not matter.
using Rates = std::vector<std::vector<double>>;

inline constexpr int kExactHosts = 16;

// The rate of the slowest link of a ring from each host to the next in the list, and from the last
// to the first.  0 for fewer than two hosts.
double slowestLink(const Rates& rates, const std::vector<int>& ring);

// All hosts, host 0 first.  The same rates give the same ring on every machine.  Throws
// Error(kArgument) unless the rates are a square of numbers.
std::vector<int> bestRing(const Rates& rates);

// The two methods; the first throws for more than 20 hosts, whose table would be too large.
std::vector<int> exactRing(const Rates& rates);
std::vector<int> searchedRing(const Rates& rates);

}  // namespace ringreduce
