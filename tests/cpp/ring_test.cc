// Rings in another order than that of the ranks: every call's result, the order of addition, what
// is refused, and rates that are measured.
#include <algorithm>
#include <functional>
#include <numeric>

#include "algorithm/cut.h"
#include "bootstrap/rendezvous.h"
#include "bootstrap/topology.h"
#include "check.h"
#include "processes.h"
#include "ranks.h"
#include "transport/tcp/survey.h"

using namespace ringreduce;
using ranks::failureOf;

namespace {

size_t at(int i) {
  return static_cast<size_t>(i);
}

// Runs body in a process for each rank; rank r is on the host of letter r.
processes::Ends onHosts(const std::string& letters, const std::string& ring,
                        const std::function<void(int, Store&)>& body) {
  processes::SharedStore store;
  return processes::run(static_cast<int>(letters.size()), [&](int r) {
    const ranks::Setting host("RINGREDUCE_HOSTID", letters.substr(at(r), 1));
    const ranks::Setting order("RINGREDUCE_RING", ring);
    body(r, store);
  });
}

void inGroup(const std::string& letters, const std::string& ring, Algorithm algorithm,
             const std::function<void(Group&)>& body) {
  SharedOptions shared;
  shared.algorithm = algorithm;
  const GroupOptions options{.name = "test", .timeout = 60 * kSecond, .shared = shared};
  const auto ends = onHosts(letters, ring, [&](int r, Store& store) {
    body(*Group::create(store, r, static_cast<int>(letters.size()), options));
  });
  for (const std::string& end : ends) CHECK_EQ(end, "");
}

float addend(int rank, size_t i) {
  return 1.f / static_cast<float>(1 + rank) + static_cast<float>((i * 7919 + at(rank)) % 1013);
}

// As float32 values are added in this order.
std::vector<float> sumInOrder(const std::vector<int>& ranks, size_t n) {
  const int P = static_cast<int>(ranks.size());
  const Cut cut{n, P};
  std::vector<float> sums(n);
  for (size_t i = 0; i < n; ++i) {
    const int chunk = cut.chunkOf(i);
    sums[i] = addend(ranks[at(kthToAdd(chunk, 0, P))], i);
    for (int k = 1; k < P; ++k) sums[i] += addend(ranks[at(kthToAdd(chunk, k, P))], i);
  }
  return sums;
}

std::vector<float> reduced(Group& group, size_t n) {
  std::vector<float> data(n);
  for (size_t i = 0; i < n; ++i) data[i] = addend(group.rank(), i);
  group.run({AllReduce{data.data(), n, DType::kFloat32, ReduceOp::kSum}});
  return data;
}

int wordOf(int from, int to) {
  return 1000 * from + to;
}

// Every other call, with an own value for each pair of ranks.
void expectMoves(Group& group) {
  const int P = group.size(), me = group.rank();
  std::vector<int> in(at(P)), out(at(P), -1);
  for (int r = 0; r < P; ++r) in[at(r)] = wordOf(me, r);
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  for (int r = 0; r < P; ++r) {
    inputs.push_back(&in[at(r)]);
    outputs.push_back(&out[at(r)]);
  }
  const std::vector<size_t> ones(at(P), 1);
  const auto expect = [&](const std::function<int(int)>& right) {
    for (int r = 0; r < P; ++r) CHECK_EQ(out[at(r)], right(r));
    std::ranges::fill(out, -1);
  };
  constexpr DType kType = DType::kInt32;
  group.run({AllToAll{inputs, outputs, ones, ones, true, kType}});
  expect([&](int r) { return wordOf(r, me); });
  group.run({AllGather{&in[0], outputs, ones, kType}});
  expect([&](int r) { return wordOf(r, 0); });
  group.run({SparseAllReduce{.gather = {&in[0], me == 1 ? size_t{0} : size_t{1}, kType,
                                        [&](const std::vector<size_t>& counts) {
                                          for (int r = 0; r < P; ++r)
                                            CHECK_EQ(counts[at(r)], r == 1 ? 0u : 1u);
                                          return outputs;
                                        }},
                             .count = 1,
                             .dtype = kType,
                             .op = ReduceOp::kSum}});
  expect([&](int r) { return r == 1 ? -1 : wordOf(r, 0); });
  for (int root = 0; root < P; ++root) {
    const bool mine = me == root;
    group.run({Gather{&in[0], mine ? outputs : std::vector<void*>(), 1, kType, root}});
    expect([&](int r) { return mine ? wordOf(r, 0) : -1; });
    int one = -1;
    group.run({Scatter{mine ? inputs : std::vector<const void*>(), &one, 1, kType, root}});
    CHECK_EQ(one, wordOf(root, me));
    std::vector<int> much(100'000, wordOf(me, 7));
    group.run({Broadcast{much.data(), much.size(), kType, root}});
    CHECK(std::ranges::all_of(much, [&](int word) { return word == wordOf(root, 7); }));
    group.run({Reduce{&in[0], &one, 1, kType, ReduceOp::kSum, root}});
    if (mine) CHECK_EQ(one, 1000 * (P * (P - 1) / 2));
  }
  for (const size_t n : {size_t{1}, size_t{50'000}}) {  // the last rank has more
    std::vector<std::vector<int>> parts;
    std::vector<size_t> counts;
    std::vector<const void*> addends;
    for (int r = 0; r < P; ++r) {
      counts.push_back(r == P - 1 ? 2 * n : n);
      parts.emplace_back(counts.back(), wordOf(me, r));
    }
    for (const std::vector<int>& part : parts) addends.push_back(part.data());
    std::vector<int> sum(counts[at(me)]);
    group.run({ReduceScatter{addends, counts, sum.data(), kType, ReduceOp::kSum}});
    for (const int word : sum) CHECK_EQ(word, 1000 * (P * (P - 1) / 2) + P * me);
    std::vector<int> all(n * at(P + 1));
    std::vector<void*> places;
    for (int r = 0; r < P; ++r) places.push_back(all.data() + n * at(r));
    group.run({AllGather{parts[at(me)].data(), places, counts, kType}});
    for (size_t i = 0; i < all.size(); ++i)
      CHECK_EQ(all[i], wordOf(static_cast<int>(std::min(i / n, at(P - 1))),
                              static_cast<int>(std::min(i / n, at(P - 1)))));
  }
  group.run({Barrier{}});
}

}  // namespace

TEST(all_algorithms_add_in_the_order_of_the_ring) {
  struct Case {
    const char *letters, *ring;
    std::vector<int> ranks;
  };
  for (const Case& c : {Case{"abc", "0,2,1", {0, 2, 1}}, Case{"abcd", "2,0,3,1", {2, 0, 3, 1}},
                        Case{"abab", "1,0", {1, 3, 0, 2}}, Case{"aab", "1, 0,2", {1, 0, 2}},
                        Case{"aabbc", "2,0,1", {4, 0, 1, 2, 3}}})
    for (const Algorithm algorithm : {Algorithm::kAuto, Algorithm::kBruck, Algorithm::kDirect,
                                      Algorithm::kTwoShot, Algorithm::kRing})
      inGroup(c.letters, c.ring, algorithm, [&](Group& group) {
        CHECK(group.epoch()->ring()->ranks == c.ranks);
        for (const size_t n : {size_t{1}, size_t{1000}, size_t{200'000}})
          if (algorithm != Algorithm::kAuto || group.epoch()->hosts->count() == group.size() ||
              n < 2000)
            CHECK(reduced(group, n) == sumInOrder(c.ranks, n));
      });
}

TEST(every_call_works_in_any_order) {
  inGroup("abcd", "3,1,0,2", Algorithm::kAuto, expectMoves);
  inGroup("aabb", "1,0", Algorithm::kAuto, expectMoves);
}

// Place l of each host adds part l; the hosts' sums of it are added in the ring's order.
TEST(the_hierarchy_goes_round_the_hosts_in_that_order) {
  inGroup("aabbcc", "2,0,1", Algorithm::kHierarchical, [](Group& group) {
    const std::vector<int> hosts{2, 0, 1};
    constexpr size_t kElements = 10'000;
    const std::vector<float> sums = reduced(group, kElements);
    const Cut parts{kElements, 2};
    for (size_t i = 0; i < kElements; ++i) {
      const int place = parts.chunkOf(i);
      const Span part = parts.chunk(place);
      const int owner = Cut{part.size, 3}.chunkOf(i - part.begin);
      const auto sumOf = [&](int host) {
        return addend(2 * host + (place + 1) % 2, i) + addend(2 * host + place, i);
      };
      float sum = sumOf(hosts[at(kthToAdd(owner, 0, 3))]);
      for (int k = 1; k < 3; ++k) sum += sumOf(hosts[at(kthToAdd(owner, k, 3))]);
      CHECK_EQ(sums[i], sum);
    }
  });
}

TEST(an_order_that_cannot_be_is_refused_by_all) {
  struct Case {
    const char *letters, *ring, *words;
  };
  for (const Case& c :
       {Case{"abc", "0,1", "is no order for group 'test': name each of its hosts, 3"},
        Case{"abc", "0,1,2,3", "is no order"},
        Case{"aabb", "0,2,1,3", "ranks of one host beside each other"},
        Case{"abc", "0,1,1", "1 stands there twice"},
        Case{"abc", "0,x", "'x' is no number of a host or a rank"},
        Case{"abc", "0,1,2,", "ends with a comma"},
        Case{"abc", "fastest", "RINGREDUCE_RING=fastest"}}) {
    const auto ends = onHosts(c.letters, c.ring, [&](int r, Store& store) {
      const int size = static_cast<int>(std::string(c.letters).size());
      CHECK(failureOf(
                [&] { Group::create(store, r, size, {.name = "test", .timeout = 20 * kSecond}); },
                c.words) == Failure::kSetup);
    });
    for (const std::string& end : ends) CHECK_EQ(end, "");
  }
}

TEST(ranks_that_wish_for_different_orders_are_told) {
  const auto ends = onHosts("abc", "", [](int r, Store& store) {
    const ranks::Setting order("RINGREDUCE_RING", r == 2 ? "0,2,1" : "");
    CHECK(failureOf([&] { Group::create(store, r, 3, {.name = "test", .timeout = 20 * kSecond}); },
                    "RINGREDUCE_RING is not set at rank 0 (pid ") == Failure::kSetup);
  });
  for (const std::string& end : ends) CHECK_EQ(end, "");
}

// Meant for the whole job: a part of its ranks takes what is said of them.
TEST(a_part_of_the_ranks_takes_its_part_of_the_order) {
  struct Case {
    const char* letters;
    const char* ring;
    int all;
    std::vector<int> numbers, ranks;
  };
  for (const Case& c :
       {Case{"abc", "3,1,0,2", 4, {0, 1, 2}, {1, 0, 2}},
        Case{"abc", "3,1,0,2", 4, {0, 2, 3}, {2, 0, 1}}, Case{"abc", "1,0", 7, {4, 5, 6}, {}},
        // Of three hosts, of which these ranks are on two.
        Case{"aab", "2,0,1", 6, {0, 1, 2}, {}}}) {
    const auto ends = onHosts(c.letters, c.ring, [&](int r, Store& store) {
      const GroupOptions options{
          .name = "test", .global_ranks = c.numbers, .timeout = 20 * kSecond, .of_ranks = c.all};
      const auto group = Group::create(store, r, 3, options);
      CHECK(group->epoch()->ring()->ranks == c.ranks);
      group->run({Barrier{}});
    });
    for (const std::string& end : ends) CHECK_EQ(end, "");
  }
}

TEST(rates_are_measured_and_all_ranks_have_the_same) {
  for (const char* letters : {"ab", "abc", "aabbcdd"}) {
    std::string seen;
    inGroup(letters, "measure", Algorithm::kAuto, [&](Group& group) {
      const HostRing& ring = *group.epoch()->ring();
      CHECK(ring.source == HostRing::Source::kMeasured);
      const size_t H = at(group.epoch()->hosts->count());
      CHECK_EQ(ring.mbit.size(), H);
      for (size_t a = 0; a < H; ++a)
        for (size_t b = 0; b < H; ++b) CHECK(a == b || ring.mbit[a][b] > 1);
      // Everybody's text of it, at everybody.
      std::string own = ring.toText();
      own.resize(2000);
      std::vector<std::string> all(at(group.size()), own);
      AllGather gather{.input = own.data(), .dtype = DType::kUInt8};
      for (std::string& one : all) gather.outputs.push_back(one.data());
      gather.counts.assign(all.size(), own.size());
      gather.outputs[at(group.rank())] = own.data();
      group.run({gather});
      for (const std::string& one : all) CHECK(one == own);
      CHECK(reduced(group, 1000) == reduced(group, 1000));
      expectMoves(group);
    });
  }
}

TEST(one_host_has_nothing_to_measure) {
  const ranks::Setting wire("RINGREDUCE_WIRE", "tcp");
  inGroup("aaa", "measure", Algorithm::kAuto, [](Group& group) {
    CHECK(group.epoch()->ring()->ranks.empty());
    expectMoves(group);
  });
}

TEST(all_pairs_of_hosts_meet) {
  for (int hosts = 2; hosts < 20; ++hosts) {
    std::vector<int> met(at(hosts * hosts));
    for (int round = 0; round < net::roundsOf(hosts); ++round)
      for (int host = 0; host < hosts; ++host) {
        const int other = net::partnerOf(host, round, hosts);
        if (other < 0) continue;
        CHECK_EQ(net::partnerOf(other, round, hosts), host);
        ++met[at(host * hosts + other)];
      }
    for (int a = 0; a < hosts; ++a)
      for (int b = 0; b < hosts; ++b) CHECK_EQ(met[at(a * hosts + b)], a == b ? 0 : 1);
  }
}

TEST(another_order_must_be_worth_it) {
  processes::SharedStore store;
  const auto ends = onHosts("abc", "", [](int r, Store& shared) {
    const GroupOptions options{.name = "test", .timeout = 20 * kSecond};
    const Hosts hosts = *rendezvous(shared, r, 3, options, [](const Hosts&) { return ""; }).hosts;
    Rates rates{{0, 100, 105}, {105, 0, 100}, {100, 105, 0}};
    CHECK(HostRing::measured(hosts, rates).ranks.empty());
    rates[0][1] = 50;
    const HostRing ring = HostRing::measured(hosts, rates);
    CHECK(ring.ranks == (std::vector<int>{0, 2, 1}));
    CHECK(HostRing::fromText(hosts, ring.toText()).mbit == rates);
    CHECK(failureOf([&] { HostRing::fromText(hosts, "0 1 1; 1 2 3"); }) == Failure::kSetup);
  });
  for (const std::string& end : ends) CHECK_EQ(end, "");
}
