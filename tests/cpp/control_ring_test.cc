// Who stands beside whom in the control ring, and who can be reached: against a search of all ways.
#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "control/control_frames.h"

using namespace ringreduce;
using net::ControlRing;

namespace {

struct Case {
  std::vector<int> order;  // of the ring
  std::vector<bool> here;  // by rank
  ControlRing::Cuts cuts;  // between any two
  std::vector<int> linked;
  int me;
};

// Those that are still there, in the ring's order.
std::vector<int> standing(const Case& c) {
  std::vector<int> ranks;
  for (int r : c.order)
    if (c.here[static_cast<size_t>(r)]) ranks.push_back(r);
  return ranks;
}

std::vector<int> beyondBySearch(const Case& c) {
  const std::vector<int> ring = standing(c);
  std::vector<bool> reached(c.here.size());
  std::vector<int> open = c.linked;
  open.push_back(c.me);
  while (!open.empty()) {
    const int at = open.back();
    open.pop_back();
    if (reached[static_cast<size_t>(at)] || !c.here[static_cast<size_t>(at)]) continue;
    reached[static_cast<size_t>(at)] = true;
    const auto place = static_cast<size_t>(std::find(ring.begin(), ring.end(), at) - ring.begin());
    for (const size_t beside : {place + 1, place + ring.size() - 1})
      if (const int other = ring[beside % ring.size()]; !c.cuts.contains(std::minmax(at, other)))
        open.push_back(other);
  }
  std::vector<int> ranks;
  for (size_t r = 0; r < c.here.size(); ++r)
    if (c.here[r] && !reached[r]) ranks.push_back(static_cast<int>(r));
  return ranks;
}

}  // namespace

TEST(neighbours_are_those_that_still_stand) {
  ControlRing ring(5, {3, 1, 4, 0, 2});
  CHECK_EQ(ring.next(3), 1);
  CHECK_EQ(ring.previous(3), 2);
  ring.remove(1);
  ring.remove(2);
  CHECK(!ring.has(1) && ring.has(0));
  CHECK_EQ(ring.next(3), 4);
  CHECK_EQ(ring.previous(3), 0);
  CHECK_EQ(ring.next(1), 4);  // from where it stood
  ring.remove(4);
  ring.remove(0);
  CHECK_EQ(ring.next(3), 3);
  CHECK_EQ(ring.previous(3), 3);
  ControlRing one(1, {});
  CHECK_EQ(one.next(0), 0);
  CHECK(one.beyond(0, {}, {}).empty());
}

TEST(a_connection_to_a_rank_that_left_leads_nowhere) {
  ControlRing ring(5, {});
  ring.remove(2);
  ring.remove(4);
  // 0, 1, 3; the cut was between two of which one has left since.
  CHECK(ring.beyond(0, {{3, 4}}, {2}).empty());
  CHECK((ring.beyond(0, {{0, 1}, {0, 3}}, {2, 4}) == std::vector<int>{1, 3}));
  // Nor does the way round from one that has left itself.
  CHECK((ring.beyond(2, {}, {}) == std::vector<int>{0, 1, 3}));
}

TEST(an_order_names_each_rank_once) {
  for (const std::vector<int>& order :
       {std::vector<int>{0, 1}, {0, 1, 1}, {0, 1, 3}, {0, 1, -1}, {0, 1, 2, 2}})
    CHECK_THROWS(ringreduce::Error, ControlRing(3, order));
}

TEST(who_is_beyond_all_cuts) {
  std::mt19937 random(1);
  for (int i = 0; i < 20'000; ++i) {
    const size_t size = 1 + random() % 9;
    Case c{std::vector<int>(size), std::vector<bool>(size, true), {}, {}, 0};
    std::iota(c.order.begin(), c.order.end(), 0);
    std::shuffle(c.order.begin(), c.order.end(), random);
    ControlRing ring(static_cast<int>(size), c.order);
    c.me = c.order[random() % size];
    for (int r : c.order)
      if (r != c.me && random() % 4 == 0) {
        c.here[static_cast<size_t>(r)] = false;
        ring.remove(r);
      }
    const std::vector<int> ranks = standing(c);
    for (size_t j = 0; j < ranks.size(); ++j)
      if (const int other = ranks[(j + 1) % ranks.size()]; random() % 3 == 0 && other != ranks[j])
        c.cuts.insert(std::minmax(ranks[j], other));
    // Connections, also to ranks that have left.
    for (size_t n = random() % 3; n > 0; --n) c.linked.push_back(c.order[random() % size]);
    CHECK(ring.beyond(c.me, c.cuts, c.linked) == beyondBySearch(c));
  }
}
