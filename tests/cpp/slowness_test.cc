// What the chooser knows of the wires: the slowest that any rank was told of or saw, the same at
// all.
#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "algorithm/agreed_line.h"
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

// Calls of one algorithm, in which rank r of P sees `seen(r)` bytes a second.  Returns after how
// many all ranks had a rate, the same.
int callsUntilAgreed(int P, const Candidate& call, const std::function<uint64_t(int)>& seen,
                     uint64_t expected) {
  const WireCost cost{.hop = 1e-6};
  std::vector<std::unique_ptr<AgreedLine>> lines;
  for (int r = 0; r < P; ++r) lines.push_back(std::make_unique<AgreedLine>(P, cost));
  for (int calls = 1; calls <= 2 * P + 8; ++calls) {
    std::vector<uint64_t> said;
    for (const auto& line : lines) said.push_back(line->says());
    const auto of = [&](int r) { return said[static_cast<size_t>((r + P) % P)]; };
    int agreed = 0;
    for (int r = 0; r < P; ++r) {
      uint64_t heard = 0;
      if (call.algorithm == Algorithm::kRing) heard = of(r - 1);
      if (call.algorithm == Algorithm::kTwoShot) heard = *std::ranges::max_element(said);
      if (call.algorithm == Algorithm::kBruck)
        for (int64_t near = 1, radix = bruckRadix(P, cost); near < P; near *= radix)
          for (int64_t d = near; d < P && d < near * radix; d += near)
            heard = std::max(heard, of(r + static_cast<int>(d)));
      agreed += lines[static_cast<size_t>(r)]->end(call, seen(r), heard);
    }
    CHECK(agreed == 0 || agreed == P);
    for (const auto& line : lines) CHECK_EQ(line->rate(), agreed ? expected : 0);
    if (agreed) return calls;
  }
  return 0;
}

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

TEST(calls_tell_the_rate_of_lines_to_all_at_once) {
  for (const int P : {2, 3, 4, 7, 16, 33}) {
    constexpr uint64_t kRate = 100'000'000;
    const auto seen = [&](int r) { return r == P / 2 ? kRate : kRate / 4; };
    const Candidate ring{Algorithm::kRing, 0, 0, 0, 1 << 20},
        two_shot{Algorithm::kTwoShot, 0, 0, 0, 1 << 20}, bruck{Algorithm::kBruck, 0, 0, 0, 1 << 20};
    // One call carries enough, and in the next ones they hear of each other.
    CHECK_EQ(callsUntilAgreed(P, ring, seen, kRate), P);
    CHECK_EQ(callsUntilAgreed(P, two_shot, seen, kRate), 2);
    const int by_bruck = callsUntilAgreed(P, bruck, seen, kRate);
    CHECK(by_bruck >= 2 && by_bruck <= P);
    // Some see nothing: the bytes came through memory, or had come before.
    CHECK_EQ(callsUntilAgreed(P, two_shot, [&](int r) { return r == 0 ? kRate : 0; }, kRate), 2);
    // Small calls and calls of a root say nothing.
    CHECK_EQ(callsUntilAgreed(P, {Algorithm::kRing, 0, 0, 0, 1000}, seen, 0), 0);
    CHECK_EQ(callsUntilAgreed(P, {}, seen, 0), 0);
  }
}

TEST(ranks_of_a_host_share_its_line_but_a_ring_crosses_it_once) {
  WireCost cost;
  cost.ranks_on_host = 4;
  for (const Algorithm algorithm : {Algorithm::kRing, Algorithm::kTwoShot, Algorithm::kBruck}) {
    AgreedLine line(1, cost);
    line.end({algorithm, 0, 0, 0, 1 << 20}, 1'000'000, 0);
    CHECK(line.end({}, 0, 0));
    CHECK_EQ(line.rate(), algorithm == Algorithm::kRing ? 1'000'000u : 4'000'000u);
  }
}

TEST(a_rate_leaves_out_the_hops_behind_the_first) {
  WireCost cost;
  cost.hop = 10e-3;
  constexpr uint64_t kBytes = 1'000'000;
  CHECK_EQ(arrivalRate(kBytes, 100 * kMillisecond, 1, cost), 10'000'000u);  // it was over by then
  CHECK_EQ(arrivalRate(kBytes, 100 * kMillisecond, 3, cost), 12'500'000u);
  CHECK_EQ(arrivalRate(kBytes, 100 * kMillisecond, 7, cost), 0u);  // most of it is hops
  CHECK_EQ(arrivalRate(1000, 100 * kMillisecond, 1, cost), 0u);
  CHECK_EQ(arrivalRate(kBytes, 0, 1, cost), 0u);
}

TEST(what_calls_measure_changes_no_bit) {
  for (const int ranks_on_host : {1, 2, 4})
    for (const Kind kind :
         {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter, Kind::kCompressedAllReduce})
      for (const double measured : {1e-10, 1e-8, 1e-6})
        for (size_t bytes = 64; bytes <= 64 << 20; bytes *= 4) {
          WireCost before, now;
          before.ranks_on_host = now.ranks_on_host = ranks_on_host;
          now.measured = measured;
          const CallSize call{kind, bytes, bytes, bytes / 4};
          const Algorithm a = choose(call, {8, ranks_on_host}, before).taken.algorithm,
                          b = choose(call, {8, ranks_on_host}, now).taken.algorithm;
          CHECK_EQ(a == Algorithm::kHierarchical, b == Algorithm::kHierarchical);
          if (kind == Kind::kCompressedAllReduce) CHECK(a == b);
        }
  WireCost slow;
  slow.hop = 10e-3;
  const CallSize call{Kind::kAllReduce, 64 << 10, 64 << 10};
  CHECK(choose(call, {64}, slow).taken.algorithm == Algorithm::kBruck);
  slow.measured = 80e-9;
  CHECK(choose(call, {64}, slow).taken.algorithm == Algorithm::kTwoShot);
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
