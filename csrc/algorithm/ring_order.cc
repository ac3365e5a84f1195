// The exact method bisects thresholds: dynamic programming over sets of hosts finds a ring whose
// links are all at least that fast.  The search starts from greedy rings, which take the fastest
// link each time, and exchanges the slowest link as long as that helps.
#include "algorithm/ring_order.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <string>

#include "base/error.h"

namespace ringreduce {
namespace {

using Ring = std::vector<int>;

constexpr int kMostExactHosts = 20;
// The search begins at so many hosts, and stops after so many exchanges.
constexpr size_t kBeginnings = 24, kMostExchanges = 2000;

size_t at(int i) {
  return static_cast<size_t>(i);
}

void check(const Rates& rates) {
  for (const std::vector<double>& row : rates) {
    if (row.size() != rates.size())
      throw Error(Failure::kArgument, "the rates between " + std::to_string(rates.size()) +
                                          " hosts must be a square, and not have a row of " +
                                          std::to_string(row.size()));
    for (const double& rate : row)
      if (&rate - row.data() != &row - rates.data() && !(std::isfinite(rate) && rate >= 0))
        throw Error(Failure::kArgument, "a rate must be a number that is not below 0");
  }
}

Ring inOrder(size_t hosts) {
  Ring ring(hosts);
  std::iota(ring.begin(), ring.end(), 0);
  return ring;
}

void beginAtHost0(Ring& ring) {
  std::rotate(ring.begin(), std::ranges::find(ring, 0), ring.end());
}

// A ring whose links have at least that rate, if there is one.  `ends[set]` has the hosts at which
// a path can end that begins at host 0 and visits the set of other hosts.
std::optional<Ring> ringOfAtLeast(const Rates& rates, double least) {
  const int others = static_cast<int>(rates.size()) - 1;
  std::vector<uint32_t> into(at(others));  // the other hosts with such a link to it
  for (int to = 0; to < others; ++to)
    for (int from = 0; from < others; ++from)
      if (from != to && rates[at(from + 1)][at(to + 1)] >= least) into[at(to)] |= 1u << from;
  std::vector<uint32_t> ends(size_t{1} << others);
  for (uint32_t set = 1; set < ends.size(); ++set)
    for (int last = 0; last < others; ++last) {
      if (!(set & 1u << last)) continue;
      const uint32_t before = set & ~(1u << last);
      const bool reached =
          before ? (ends[before] & into[at(last)]) != 0 : rates[0][at(last + 1)] >= least;
      if (reached) ends[set] |= 1u << last;
    }
  uint32_t last_ones = ends.back();
  for (int host = 0; host < others; ++host)
    if (rates[at(host + 1)][0] < least) last_ones &= ~(1u << host);
  if (last_ones == 0) return std::nullopt;

  Ring ring;
  for (uint32_t set = static_cast<uint32_t>(ends.size() - 1); set != 0;) {
    const int last = std::countr_zero(last_ones);
    ring.push_back(last + 1);
    set &= ~(1u << last);
    last_ones = ends[set] & into[at(last)];
  }
  ring.push_back(0);
  std::ranges::reverse(ring);
  return ring;
}

// The rates of the links, slowest first: a better ring is lexicographically greater.
std::vector<double> rank(const Rates& rates, const Ring& ring) {
  std::vector<double> links;
  for (size_t i = 0; i < ring.size(); ++i)
    links.push_back(rates[at(ring[i])][at(ring[(i + 1) % ring.size()])]);
  std::ranges::sort(links);
  return links;
}

// From `first` on, always to the host with the fastest link.
Ring begunAt(const Rates& rates, int first) {
  Ring ring{first}, left;
  for (int host = 0; host < static_cast<int>(rates.size()); ++host)
    if (host != first) left.push_back(host);
  while (!left.empty()) {
    const std::vector<double>& from = rates[at(ring.back())];
    const auto next =
        std::ranges::max_element(left, [&](int a, int b) { return from[at(a)] < from[at(b)]; });
    ring.push_back(*next);
    left.erase(next);
  }
  return ring;
}

// Exchanges links as long as that makes the slowest one faster, or fewer as slow.
void improve(const Rates& rates, Ring& ring) {
  const size_t n = ring.size();
  const auto rate = [&](size_t i, size_t j) { return rates[at(ring[i % n])][at(ring[j % n])]; };
  for (size_t exchange = 0; exchange < kMostExchanges; ++exchange) {
    // The slowest link becomes the one that closes the ring.
    size_t slowest = 0;
    for (size_t i = 1; i < n; ++i)
      if (rate(i, i + 1) < rate(slowest, slowest + 1)) slowest = i;
    std::ranges::rotate(ring, ring.begin() + static_cast<long>((slowest + 1) % n));
    const double worst = rate(n - 1, 0);
    double best = worst;
    size_t first = 0, second = 0;
    bool reversed = false;
    // Swaps the part up to i with the part from there up to j; or reverses the part up to i.
    for (size_t i = 0; i + 1 < n; ++i) {
      for (size_t j = i + 1; j + 1 < n; ++j) {
        const double least = std::min({rate(n - 1, i + 1), rate(j, 0), rate(i, j + 1)});
        if (least > best) best = least, first = i, second = j, reversed = false;
      }
      double least = std::min(rate(n - 1, i), rate(0, i + 1));
      for (size_t k = 0; k < i && least > best; ++k) least = std::min(least, rate(k + 1, k));
      if (least > best) best = least, first = i, reversed = true;
    }
    if (best <= worst) return;
    const auto place = [&](size_t i) { return ring.begin() + static_cast<long>(i); };
    if (reversed)
      std::reverse(ring.begin(), place(first + 1));
    else
      std::rotate(ring.begin(), place(first + 1), place(second + 1));
  }
}

}  // namespace

double slowestLink(const Rates& rates, const std::vector<int>& ring) {
  if (ring.size() < 2) return 0;
  return rank(rates, ring).front();
}

std::vector<int> exactRing(const Rates& rates) {
  check(rates);
  const size_t n = rates.size();
  if (n > kMostExactHosts)
    throw Error(Failure::kArgument,
                "the best ring of " + std::to_string(n) + " hosts can only be searched for");
  if (n < 3) return inOrder(n);
  std::vector<double> thresholds;
  for (size_t a = 0; a < n; ++a)
    for (size_t b = 0; b < n; ++b)
      if (a != b) thresholds.push_back(rates[a][b]);
  std::ranges::sort(thresholds);
  const auto repeated = std::ranges::unique(thresholds);
  thresholds.erase(repeated.begin(), repeated.end());
  // The lowest threshold always has a ring.
  size_t possible = 0, beyond = thresholds.size();
  Ring best = *ringOfAtLeast(rates, thresholds[0]);
  while (beyond - possible > 1) {
    const size_t middle = possible + (beyond - possible) / 2;
    if (auto ring = ringOfAtLeast(rates, thresholds[middle])) {
      best = std::move(*ring);
      possible = middle;
    } else {
      beyond = middle;
    }
  }
  return best;
}

std::vector<int> searchedRing(const Rates& rates) {
  check(rates);
  const size_t n = rates.size();
  if (n < 3) return inOrder(n);
  std::vector<Ring> beginnings{inOrder(n)};
  const size_t step = std::max<size_t>(1, n / kBeginnings);
  for (size_t first = 0; first < n; first += step)
    beginnings.push_back(begunAt(rates, static_cast<int>(first)));
  Ring best;
  std::vector<double> best_rank;
  for (Ring& ring : beginnings) {
    improve(rates, ring);
    std::vector<double> its = rank(rates, ring);
    if (!best.empty() && its <= best_rank) continue;
    best = std::move(ring);
    best_rank = std::move(its);
  }
  beginAtHost0(best);
  return best;
}

std::vector<int> bestRing(const Rates& rates) {
  return rates.size() <= kExactHosts ? exactRing(rates) : searchedRing(rates);
}

}  // namespace ringreduce
