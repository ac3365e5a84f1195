// In which order hosts form a ring, so that its slowest link is as fast as can be.
//
// A ring moves as many bytes over each of its links, so it is as fast as the slowest.  Between data
// centres lines differ, and a line's two directions may: `rates[a][b]` is that from a to b.  To
// find the best ring is the travelling salesman's problem of the bottleneck kind: exactly for up to
// kExactHosts, and by search for more.
#pragma once

#include <vector>

namespace ringreduce {

// Square, by host; the diagonal does not matter.
using Rates = std::vector<std::vector<double>>;

inline constexpr int kExactHosts = 16;

// The rate of the slowest link of a ring that goes from each host to the next in the list, and from
// the last to the first.  Of fewer than two hosts: 0.
double slowestLink(const Rates& rates, const std::vector<int>& ring);

// All hosts, host 0 first.  The same for the same rates, on every machine.  Throws Error(kArgument)
// for what is no square of numbers.
std::vector<int> bestRing(const Rates& rates);

// The two ways to find it; the first throws for more than 20 hosts, whose table would not fit.
std::vector<int> exactRing(const Rates& rates);
std::vector<int> searchedRing(const Rates& rates);

}  // namespace ringreduce
