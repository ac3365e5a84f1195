// The order of a ring of hosts: against all orders there are, and the search against what is exact.
#include "algorithm/ring_order.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <numeric>
#include <random>

#include "base/error.h"
#include "check.h"

using namespace ringreduce;

namespace {

enum class Kind { kAny, kFew, kSymmetric, kClusters };

Rates randomRates(int hosts, Kind kind, std::mt19937& random) {
  const auto n = static_cast<size_t>(hosts);
  std::uniform_real_distribution<double> any(1, 1000);
  std::uniform_int_distribution<int> few(1, 4);
  Rates rates(n, std::vector<double>(n, 0));
  for (size_t a = 0; a < n; ++a)
    for (size_t b = 0; b < n; ++b) {
      if (a == b) continue;
      rates[a][b] = kind == Kind::kFew ? 100 * few(random) : any(random);
      if (kind == Kind::kSymmetric && b < a) rates[a][b] = rates[b][a];
      if (kind == Kind::kClusters && a % 3 == b % 3) rates[a][b] += 5000;
    }
  return rates;
}

double byAllOrders(const Rates& rates) {
  std::vector<int> ring(rates.size());
  std::iota(ring.begin(), ring.end(), 0);
  double best = 0;
  do {
    double slowest = 1e300;
    for (size_t i = 0; i < ring.size(); ++i)
      slowest = std::min(
          slowest,
          rates[static_cast<size_t>(ring[i])][static_cast<size_t>(ring[(i + 1) % ring.size()])]);
    best = std::max(best, slowest);
  } while (std::next_permutation(ring.begin() + 1, ring.end()));
  return best;
}

void expectRing(const std::vector<int>& ring, int hosts) {
  std::vector<int> sorted = ring;
  std::ranges::sort(sorted);
  std::vector<int> all(static_cast<size_t>(hosts));
  std::iota(all.begin(), all.end(), 0);
  CHECK(sorted == all);
  if (hosts > 0) CHECK_EQ(ring[0], 0);
}

Failure failureOf(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.kind();
  }
  return Failure::kNone;
}

}  // namespace

TEST(no_order_has_a_faster_slowest_link) {
  std::mt19937 random(1);
  for (int hosts = 2; hosts <= 7; ++hosts)
    for (const Kind kind : {Kind::kAny, Kind::kFew, Kind::kSymmetric, Kind::kClusters})
      for (int draw = 0; draw < 25; ++draw) {
        const Rates rates = randomRates(hosts, kind, random);
        const std::vector<int> ring = bestRing(rates);
        expectRing(ring, hosts);
        CHECK_EQ(slowestLink(rates, ring), byAllOrders(rates));
        CHECK(bestRing(rates) == ring);
      }
}

TEST(the_direction_of_a_ring_matters) {
  const Rates rates{{0, 9, 1}, {1, 0, 9}, {9, 1, 0}};
  CHECK(bestRing(rates) == (std::vector<int>{0, 1, 2}));
  const Rates turned{{0, 1, 9}, {9, 0, 1}, {1, 9, 0}};
  CHECK(bestRing(turned) == (std::vector<int>{0, 2, 1}));
  CHECK_EQ(slowestLink(turned, {0, 1, 2}), 1.);
}

// Random rates are the hardest: between real hosts they come in a few kinds.
TEST(the_search_comes_near_what_is_exact) {
  std::mt19937 random(2);
  for (const Kind kind : {Kind::kAny, Kind::kFew, Kind::kSymmetric, Kind::kClusters}) {
    double sum = 0, worst = 1;
    int draws = 0;
    for (int hosts = 4; hosts <= kExactHosts; hosts += 2)
      for (int draw = 0; draw < 3; ++draw, ++draws) {
        const Rates rates = randomRates(hosts, kind, random);
        const std::vector<int> ring = searchedRing(rates);
        expectRing(ring, hosts);
        const double share = slowestLink(rates, ring) / slowestLink(rates, exactRing(rates));
        CHECK(share <= 1);
        sum += share;
        worst = std::min(worst, share);
      }
    std::printf("kind %d: the slowest link is %.3f of the best on average, %.3f at worst\n",
                static_cast<int>(kind), sum / draws, worst);
    CHECK(sum / draws > 0.9 && worst > 0.6);
  }
}

TEST(many_hosts_are_searched_through) {
  std::mt19937 random(3);
  const Rates rates = randomRates(100, Kind::kAny, random);
  const std::vector<int> ring = bestRing(rates);
  expectRing(ring, 100);
  std::vector<int> as_they_are(100);
  std::iota(as_they_are.begin(), as_they_are.end(), 0);
  CHECK(slowestLink(rates, ring) > 10 * slowestLink(rates, as_they_are));
}

TEST(a_few_hosts_have_one_ring) {
  CHECK(bestRing({}).empty());
  CHECK(bestRing({{0}}) == (std::vector<int>{0}));
  CHECK(bestRing({{0, 1}, {2, 0}}) == (std::vector<int>{0, 1}));
  CHECK_EQ(slowestLink({{0, 1}, {2, 0}}, {0, 1}), 1.);
  CHECK_EQ(slowestLink({{0}}, {0}), 0.);
}

TEST(what_is_no_square_of_numbers_is_refused) {
  CHECK(failureOf([] { bestRing({{0, 1}, {2}}); }) == Failure::kArgument);
  CHECK(failureOf([] { bestRing({{0, -1}, {2, 0}}); }) == Failure::kArgument);
  CHECK(failureOf([] { bestRing({{0, std::nan("")}, {2, 0}}); }) == Failure::kArgument);
  CHECK(failureOf([] { bestRing({{std::nan(""), 1}, {2, 0}}); }) == Failure::kNone);
  CHECK(failureOf([] { exactRing(Rates(21, std::vector<double>(21, 1))); }) == Failure::kArgument);
}
