// Offsets of clocks from heartbeats: under delay, jitter, skew and drift the true offset is within
// the error, along a ring of ranks too; and between real control connections.
#include "control/clock_offset.h"

#include <algorithm>
#include <cstdlib>
#include <queue>
#include <random>
#include <vector>

#include "check.h"
#include "control_world.h"

using namespace ringreduce;
using namespace control_world;
using net::Heartbeat;
using net::NeighbourClock;

namespace {

// Ranks in a ring, their clocks, and heartbeats under way between neighbours; in simulated time.
class Hosts {
 public:
  struct Line {
    Nanos delay, jitter;  // each way; the jitter's tail is long
  };

  Hosts(const std::vector<Nanos>& skews, const std::vector<Nanos>& drifts, Line line)
      : line_(line) {
    const int size = static_cast<int>(skews.size());
    for (int r = 0; r < size; ++r) {
      const auto i = static_cast<size_t>(r);
      ranks_.push_back({skews[i], drifts[i], r == 0 ? ClockOffset{.error = 0} : ClockOffset{}, {}});
      for (const int peer : {(r + size - 1) % size, (r + 1) % size})
        ranks_.back().links.push_back({peer, NeighbourClock(false)});
    }
  }

  // Sends heartbeats every half second; returns the largest error of an estimate, and checks that
  // each is within its bound.
  Nanos run(Nanos seconds) {
    Nanos worst = 0;
    std::uniform_int_distribution<Nanos> phase(0, kSecond / 2);
    for (int r = 0; r < size(); ++r) events_.push({phase(random_), r, -1, {}});
    while (!events_.empty() && events_.top().time < seconds * kSecond) {
      const Event event = events_.top();
      events_.pop();
      if (event.from < 0) {
        for (Link& link : at(event.rank).links) send(event.time, event.rank, link);
        events_.push({event.time + kSecond / 2, event.rank, -1, {}});
        continue;
      }
      Rank& rank = at(event.rank);
      const Nanos time = clockOf(event.rank, event.time);
      for (Link& link : rank.links)
        if (link.peer == event.from) link.clock.add(event.beat, time);
      if (event.rank == 0) continue;
      ClockOffset best;
      for (const Link& link : rank.links)
        if (const ClockOffset by = link.clock.offset(time); by.error < best.error) best = by;
      if (!best.isKnown()) continue;
      rank.offset = best;
      const Nanos truth = time - clockOf(0, event.time);
      CHECK(std::abs(best.ahead - truth) <= best.error);
      worst = std::max(worst, std::abs(best.ahead - truth));
    }
    return worst;
  }

  int size() const { return static_cast<int>(ranks_.size()); }
  const ClockOffset& offset(int r) { return at(r).offset; }

 private:
  struct Link {
    int peer;
    NeighbourClock clock;
  };
  struct Rank {
    Nanos skew, drift;  // of 10^9
    ClockOffset offset;
    std::vector<Link> links;
  };
  struct Event {
    Nanos time;
    int rank, from;  // from -1: it sends heartbeats
    Heartbeat beat;
    bool operator<(const Event& other) const { return time > other.time; }
  };

  Rank& at(int r) { return ranks_[static_cast<size_t>(r)]; }
  // Clocks start at a time of their own, as CLOCK_MONOTONIC does.
  Nanos clockOf(int r, Nanos time) {
    return 1000 * kSecond + at(r).skew + time + time / kMillisecond * at(r).drift / 1000;
  }
  void send(Nanos time, int from, const Link& link) {
    std::exponential_distribution<double> tail(1.0);
    const auto late = static_cast<Nanos>(tail(random_) * static_cast<double>(line_.jitter));
    events_.push({time + line_.delay + late,
                  link.peer,
                  from,
                  {.sent = clockOf(from, time),
                   .difference = link.clock.difference(),
                   .offset = at(from).offset}});
  }

  const Line line_;
  std::vector<Rank> ranks_;
  std::priority_queue<Event> events_;
  std::mt19937 random_{7};
};

}  // namespace

TEST(the_offset_is_within_its_error_under_skew_delay_jitter_and_drift) {
  // 10 ms of skew, 25 ms each way, 50 ppm; and clocks that are hours apart.
  Hosts two({0, 10 * kMillisecond}, {0, 50'000}, {25 * kMillisecond, kMillisecond});
  two.run(600);
  CHECK(two.offset(1).isKnown());
  CHECK(two.offset(1).error < 30 * kMillisecond);
  Hosts far({0, -9'000 * kSecond, 86'400 * kSecond}, {-20'000, 20'000, 5'000},
            {50 * kMicrosecond, 20 * kMicrosecond});
  far.run(600);
  for (const int r : {1, 2}) CHECK(far.offset(r).error < 2 * kMillisecond);
}

TEST(errors_add_up_along_the_ring) {
  const std::vector<Nanos> skews{0, 5, -7, 11, -13, 17, -19, 23};
  const std::vector<Nanos> drifts{0, 30'000, -30'000, 10'000, -10'000, 20'000, -20'000, 0};
  Hosts hosts(skews, drifts, {100 * kMicrosecond, 100 * kMicrosecond});
  hosts.run(300);
  for (int r = 1; r < 8; ++r) {
    const int hops = std::min(r, 8 - r);
    CHECK(hosts.offset(r).isKnown());
    CHECK(hosts.offset(r).error < hops * 2 * kMillisecond);
  }
}

TEST(two_ranks_of_a_host_do_not_keep_each_others_offset_alive) {
  NeighbourClock shared(true);
  shared.add({.sent = kSecond, .difference = 0, .offset = {.ahead = 5, .error = 100}}, kSecond);
  const ClockOffset soon = shared.offset(kSecond), later = shared.offset(61 * kSecond);
  CHECK_EQ(soon.ahead, Nanos{5});
  CHECK(soon.error > 100);
  CHECK(later.error > soon.error + kMillisecond);
}

TEST(ranks_of_a_control_ring_know_the_clock_soon) {
  // All have the same clock here.
  for (const int size : {2, 5}) {
    Control::Options options = Ranks::quick();
    for (int r = 0; r < size; ++r) options.hosts.push_back(r / 2);
    Ranks ranks(size, Over::kUnix, options);
    for (int r = 0; r < size; ++r) {
      const auto clock = [&] { return ranks.at(r).locked([&] { return ranks.at(r).clock; }); };
      until([&] { return clock().isKnown(); }, "the offset of its clock");
      CHECK(std::abs(clock().ahead) <= clock().error);
    }
  }
}
