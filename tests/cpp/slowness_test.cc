// What the chooser knows of the wires: the slowest that any rank was told of or saw, the same at
// all.
#include <algorithm>
#include <functional>

#include "algorithm/choose.h"
#include "bootstrap/topology.h"
#include "check.h"
#include "processes.h"
#include "ranks.h"

using namespace ringreduce;

namespace {

WireCost costOf(const AgreedWireCost& agreed) {
  WireCost cost;
  agreed.applyTo(cost);
  return cost;
}

bool near(double a, double b) {
  return a > b * 0.999 && a < b * 1.001;
}

// A process for each rank, each on a host of its own.
void apart(int size, const std::function<void(int, Store&)>& body) {
  processes::SharedStore store;
  const auto ends = processes::run(size, [&](int r) {
    const ranks::Setting host("RINGREDUCE_HOSTID", std::to_string(r));
    body(r, store);
  });
  for (const std::string& end : ends) CHECK_EQ(end, "");
}

}  // namespace

TEST(what_is_not_known_leaves_the_model_as_it_is) {
  CHECK_EQ(costOf(AgreedWireCost::fromEnvironment()).hop, WireCost{}.hop);
  CHECK_EQ(costOf(AgreedWireCost::fromEnvironment()).byte, WireCost{}.byte);
}

TEST(what_is_said_goes_before_what_is_seen) {
  const ranks::Setting round_trip("RINGREDUCE_ROUND_TRIP_MS", "50");
  const ranks::Setting bandwidth("RINGREDUCE_BANDWIDTH_MBIT", "500");
  AgreedWireCost agreed = AgreedWireCost::fromEnvironment();
  agreed.observeRoundTrip(kMillisecond);
  agreed.observeBandwidth(9);
  CHECK(near(costOf(agreed).hop, 0.025 + WireCost::kSystem));
  CHECK(near(costOf(agreed).byte, 16e-9));
}

TEST(the_slower_of_two_holds) {
  AgreedWireCost a, b;
  a.observeRoundTrip(2 * kMillisecond);
  a.observeBandwidth(1000);
  b.observeRoundTrip(kMillisecond);
  b.observeBandwidth(100);
  const std::string of_a = a.text(), of_b = b.text();
  a.merge(of_b);
  b.merge(of_a);
  CHECK_EQ(a.text(), b.text());
  CHECK(near(costOf(a).hop, 0.001 + WireCost::kSystem));
  CHECK(near(costOf(a).byte, 80e-9));
}

TEST(all_ranks_agree) {
  for (const int size : {2, 3, 5})
    apart(size, [&](int r, Store& store) {
      // One was told of a long way, and one of a narrow one; the others see what there is.
      const std::string lengths[] = {"", "40", ""}, widths[] = {"50", "", ""};
      const ranks::Setting length("RINGREDUCE_ROUND_TRIP_MS", lengths[r % 3]);
      const ranks::Setting width("RINGREDUCE_BANDWIDTH_MBIT", widths[r % 3]);
      const auto group = Group::create(store, r, size, {.name = "test", .timeout = 20 * kSecond});
      CHECK(near(group->epoch()->wireCost().hop, 0.02 + WireCost::kSystem));
      CHECK(near(group->epoch()->wireCost().byte, 160e-9));
      group->run({Barrier{}});
    });
}

TEST(what_is_seen_is_no_more_than_a_process_takes) {
  apart(3, [](int r, Store& store) {
    const auto group = Group::create(store, r, 3, {.name = "test", .timeout = 20 * kSecond});
    CHECK(group->epoch()->wireCost().hop >= WireCost::kSystem &&
          group->epoch()->wireCost().hop < 0.1);
    group->run({Barrier{}});
  });
}

TEST(a_choice_has_its_candidates) {
  for (const int ranks_on_host : {1, 2, 4})
    for (const double hop : {30e-6, 1e-3, 25e-3})
      for (size_t bytes = 64; bytes <= 64 << 20; bytes *= 4) {
        WireCost cost;
        cost.hop = hop;
        cost.ranks_on_host = ranks_on_host;
        const AlgorithmChoice found =
            choose({Kind::kAllReduce, bytes, bytes}, {8, ranks_on_host}, cost);
        CHECK(std::ranges::count(found.candidates(), found.taken.algorithm, &Candidate::algorithm));
        CHECK(*found.why != 0);
        CHECK_EQ(found.count, ranks_on_host > 1 ? 4u : 3u);
        for (const Candidate& one : found.candidates())
          CHECK(one.seconds > 0 && one.hops >= 1 && one.messages >= 1 && one.bytes > 0);
      }
}
