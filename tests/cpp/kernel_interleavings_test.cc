// The GPU kernels in every interleaving: their own steps (recorded_block.h) are proven free of
// races and deadlocks by two methods (interleavings.h), and mistakes put in, each of which must be
// found.
#include <cstdio>
#include <functional>
#include <random>

#include "interleavings_check.h"
#include "recorded_block.h"

using namespace interleavings;
using namespace recorded;

namespace {

using Byte = Element<DType::kUInt8>;
using Half = Element<DType::kFloat16>;
constexpr Mutant kWeakPublish{.weak_publish = true}, kWeakObserve{.weak_observe = true};

// Elements of a message of so many slices a rank and channel.
size_t message(DeviceAlgorithm algorithm, int ranks, int channels, size_t slices) {
  const size_t one = kChunkElements * static_cast<size_t>(channels) * slices;
  return algorithm == DeviceAlgorithm::kOneShot ? one : one * static_cast<size_t>(ranks);
}
Call callOf(DeviceAlgorithm algorithm, const Shape& shape, size_t slices, size_t window = 1) {
  return {.algorithm = algorithm,
          .count = message(algorithm, shape.ranks, shape.channels, slices),
          .window = window,
          .channels = shape.channels};
}
// Of a kind that has parts; by the pushes of two-shot.
Call callOf(Kind kind, const Shape& shape, size_t slices, bool two_hops = false) {
  const auto as = two_hops ? DeviceAlgorithm::kTwoShot : DeviceAlgorithm::kOneShot;
  Call call = callOf(as, shape, slices);
  call.algorithm = DeviceAlgorithm::kTwoShot;
  call.kind = kind;
  call.root = shape.ranks - 1;
  call.two_hops = two_hops;
  return call;
}
constexpr Kind kOfParts[] = {Kind::kReduceScatter, Kind::kAllGather, Kind::kBroadcast};

// Of which kind of push slot a racing address is; neither of the ring's or the user's.
struct PushRaces {
  bool parts = false, results = false, other = false;
};
PushRaces pushRaces(const Shape& shape, const Program& program) {
  const DeviceLayout layout{.ranks = shape.ranks,
                            .channels = shape.channels,
                            .slot_bytes = shape.slot_bytes,
                            .depth = shape.depth,
                            .part_bytes = shape.slot_bytes};
  PushRaces found;
  for (size_t address : order(program).races) {
    const size_t region = address / kRegion, at = address % kRegion;
    if (region >= static_cast<size_t>(shape.ranks) || at < layout.pushBegin()) {
      found.other = true;
      continue;
    }
    const size_t of_kind = kPushSets * static_cast<size_t>(shape.ranks) * shape.slot_bytes;
    ((at - layout.pushBegin()) / of_kind % 2 == 0 ? found.parts : found.results) = true;
  }
  return found;
}

PushRaces withSets(uint64_t sets, const Shape& shape, const std::vector<Call>& calls) {
  return pushRaces(shape, record<Byte>(shape, calls, {.sets = sets}));
}

// The program with each publication of some flags moved up: before the data that it speaks of is
// read or written.
Program hasty(Program program, const std::function<bool(size_t)>& flag) {
  for (auto& lane : program.lanes)
    for (size_t i = 1; i < lane.size(); ++i) {
      if (lane[i].what != Do::kPublish || !flag(lane[i].at % kRegion)) continue;
      size_t j = i;
      const auto over = [&](Do what) {
        if (j == 0 || lane[j - 1].what != what) return false;
        std::swap(lane[j - 1], lane[j]);
        --j;
        return true;
      };
      while (over(Do::kPublish)) continue;
      over(Do::kBarrier);
      over(Do::kAccess);
    }
  return program;
}

}  // namespace

TEST(every_state_of_small_kernels) {
  using enum DeviceAlgorithm;
  struct Case {
    const char* what;
    Shape shape;
    std::vector<std::pair<DeviceAlgorithm, size_t>> calls;  // and how many slices
    size_t window = 1;
  };
  const std::vector<Case> cases{
      {"one-shot, 2 ranks, 3 lanes", {2, 1, 3}, {{kOneShot, 3}, {kOneShot, 2}}},
      {"one-shot, 3 ranks, 2 lanes", {3, 1, 2}, {{kOneShot, 3}, {kOneShot, 2}}},
      {"one-shot, 4 ranks", {4}, {{kOneShot, 3}, {kOneShot, 2}}},
      {"one-shot, 5 ranks", {5}, {{kOneShot, 2}, {kOneShot, 1}}},
      {"two-shot, 2 ranks, 2 lanes", {2, 1, 2}, {{kTwoShot, 5}, {kTwoShot, 2}}},
      {"two-shot, 3 ranks", {3}, {{kTwoShot, 6}, {kTwoShot, 2}}},
      {"two-shot, 3 ranks, 2 lanes", {3, 1, 2}, {{kTwoShot, 3}}},
      {"two-shot, 4 ranks", {4}, {{kTwoShot, 2}}},
      {"ring, 2 ranks, 3 lanes", {2, 1, 3}, {{kRing, 4}, {kRing, 1}}},
      {"ring, 3 ranks", {3}, {{kRing, 6}, {kRing, 2}}},
      {"ring, 3 ranks, 2 lanes", {3, 1, 2}, {{kRing, 3}}},
      {"ring, 3 ranks, 2 lanes, 4 slots, window 3", {3, 1, 2, 4}, {{kRing, 4}}, 3},
      {"ring, 4 ranks", {4}, {{kRing, 3}}},
      {"ring, 4 ranks, 2 lanes", {4, 1, 2}, {{kRing, 1}}},
      {"all in turn, 2 ranks, 2 lanes",
       {2, 1, 2},
       {{kOneShot, 3}, {kTwoShot, 3}, {kRing, 3}, {kTwoShot, 2}, {kOneShot, 1}, {kRing, 1}}},
      {"all in turn, 3 ranks",
       {3},
       {{kOneShot, 2}, {kTwoShot, 2}, {kRing, 1}, {kTwoShot, 2}, {kOneShot, 1}}},
      {"one-shot and two-shot, 2 channels", {2, 2}, {{kOneShot, 2}, {kTwoShot, 2}}},
      {"ring, 2 channels", {2, 2}, {{kRing, 3}}},
  };
  for (const Case& c : cases) {
    std::vector<Call> calls;
    for (const auto& [algorithm, slices] : c.calls)
      calls.push_back(callOf(algorithm, c.shape, slices, c.window));
    holds(c.what, record<Byte>(c.shape, calls));
  }
}

TEST(every_state_of_small_calls_of_parts) {
  struct Case {
    const char* what;
    Shape shape;
    std::vector<std::pair<Kind, size_t>> calls;
  };
  using enum Kind;
  const std::vector<Case> cases{
      {"reduce-scatter, 2 ranks, 2 lanes", {2, 1, 2}, {{kReduceScatter, 5}, {kReduceScatter, 2}}},
      {"reduce-scatter, 3 ranks", {3}, {{kReduceScatter, 5}, {kReduceScatter, 2}}},
      {"all-gather, 2 ranks, 2 lanes", {2, 1, 2}, {{kAllGather, 5}, {kAllGather, 2}}},
      {"all-gather, 3 ranks", {3}, {{kAllGather, 5}, {kAllGather, 2}}},
      {"broadcast, 2 ranks, 2 lanes", {2, 1, 2}, {{kBroadcast, 5}, {kBroadcast, 2}}},
      {"broadcast, 3 ranks", {3}, {{kBroadcast, 5}, {kBroadcast, 2}}},
      {"all in turn, 2 ranks, 2 lanes",
       {2, 1, 2},
       {{kReduceScatter, 3}, {kAllGather, 3}, {kAllReduce, 2}, {kBroadcast, 3}, {kAllReduce, 2}}},
      {"all in turn, 3 ranks",
       {3},
       {{kAllReduce, 1}, {kReduceScatter, 2}, {kBroadcast, 2}, {kAllGather, 2}, {kAllReduce, 1}}},
  };
  for (const Case& c : cases) {
    std::vector<Call> calls;
    for (const auto& [kind, slices] : c.calls)
      calls.push_back(kind == kAllReduce ? callOf(DeviceAlgorithm::kTwoShot, c.shape, slices)
                                         : callOf(kind, c.shape, slices));
    holds(c.what, record<Byte>(c.shape, calls));
  }
  const auto two_hops = [](const Shape& shape, size_t slices) {
    return callOf(kBroadcast, shape, slices, true);
  };
  const Shape two{2, 1, 2}, three{3};
  holds("broadcast in two hops, 2 ranks, 2 lanes",
        record<Byte>(two, {two_hops(two, 4), two_hops(two, 2)}));
  holds("broadcast in two hops, 3 ranks",
        record<Byte>(three, {two_hops(three, 4), callOf(kAllGather, three, 2)}));
}

// Calls on tensors where they are, beside calls by slots, of ranks whose tensors are mapped and of
// ranks that use their windows.  Not only flags but the users' tensors are watched: peers read
// and write them.  So are the tables in which they find each other's tensors.
TEST(every_state_of_small_located_calls) {
  constexpr uint32_t kMapped = 0, kStaged = ~0u, kSome = 0b0110;
  using enum Kind;
  constexpr Kind kLocated[] = {kAllReduce, kReduceScatter, kAllGather};
  const auto located = [](const Shape& shape, uint32_t staged, bool in_place, size_t turns = 1,
                          Kind kind = kAllReduce) {
    Call call = kind == kAllReduce ? callOf(DeviceAlgorithm::kTwoShot, shape, turns)
                                   : callOf(kind, shape, turns);
    call.in_place = in_place;
    call.located = true;
    call.staged = staged;
    return call;
  };
  for (const Shape& shape :
       {Shape{.ranks = 2, .lanes = 2, .slot_bytes = 512}, Shape{.ranks = 3, .slot_bytes = 512},
        Shape{.ranks = 2, .channels = 2, .slot_bytes = 512}}) {
    const size_t slices = shape.ranks == 2 ? 2 : 1;
    const Call two = callOf(DeviceAlgorithm::kTwoShot, shape, slices);
    const Call one = callOf(DeviceAlgorithm::kOneShot, shape, 3);
    for (const uint32_t staged : {kMapped, kStaged, kSome}) {
      const Call here = located(shape, staged, true), there = located(shape, staged, false),
                 turns = located(shape, staged, true, slices);
      const auto proven = [&](const std::vector<Call>& calls) {
        return order(record<Half>(shape, calls)).proven();
      };
      holds("located", record<Half>(shape, {turns, there}));
      CHECK(proven({one, here, two, turns, there, there, turns, two, one, here}));
      std::vector<Call> mixture{one};
      for (const Kind kind : {kReduceScatter, kAllGather}) {
        const Call parts_here = located(shape, staged, true, slices, kind),
                   parts_there = located(shape, staged, false, 1, kind);
        holds(name(kind), record<Half>(shape, {parts_here, parts_there}));
        for (const Call& call : {parts_here, there, parts_there, two, parts_there, here})
          mixture.push_back(call);
      }
      CHECK(proven(mixture));
      // Twice: the next call uses the tensors again.
      for (const Kind kind : kLocated)
        for (const bool in_place : {true, false}) {
          const Call call = located(shape, staged, in_place, in_place ? slices : 1, kind);
          CHECK(!order(record<Half>(shape, {call, call}, kWeakPublish)).races.empty());
          CHECK(!order(record<Half>(shape, {call, call}, kWeakObserve)).races.empty());
          if (shape.lanes == 1) continue;
          races("located without a barrier before a flag",
                record<Half>(shape, {call, call}, {.forgets_sync = true}));
          races("located without a barrier after a wait",
                record<Half>(shape, {call, call}, {.forgets_any = true}));
        }
    }
  }
  for (const int ranks : {2, 4, 8}) {
    const Shape shape{.ranks = ranks, .slot_bytes = 512};
    Call one = callOf(DeviceAlgorithm::kOneShot, shape, 2);
    Call two = callOf(DeviceAlgorithm::kTwoShot, shape, 2);
    Call some = located(shape, 0b01100011, true, 3), none = located(shape, kMapped, false);
    Call scatter = located(shape, 0b01100011, true, 2, kReduceScatter);
    for (Call* call : {&one, &two, &some, &none, &scatter}) call->fixed = true;
    CHECK(order(record<Half>(shape, {one, two, some, none, scatter, two, none, scatter, some, one}))
              .proven());
  }
}

// That a flag says where a tensor is before it says that it is there, that peers look only then,
// and that memory is used again only after all results.
TEST(mistakes_with_locations_are_found) {
  const Shape shape{.ranks = 2, .lanes = 2, .slot_bytes = 512};
  const DeviceLayout layout{
      .ranks = 2, .channels = 1, .slot_bytes = 512, .depth = 2, .part_bytes = 512};
  const auto isFlag = [&](DeviceLayout::Of of) {
    return [&layout, of](size_t flag) {
      return flag >= layout.pushedFlag(0, of, 0) && flag <= layout.pushedFlag(0, of, 1);
    };
  };
  // Regions: the ranks' memory, their two tensors each, their tables.
  const auto isTable = [](const Range& range) {
    return range.begin / kRegion == 6 || range.begin / kRegion == 7;
  };
  for (const Kind kind : {Kind::kAllReduce, Kind::kReduceScatter, Kind::kAllGather}) {
    Call call = kind == Kind::kAllReduce ? callOf(DeviceAlgorithm::kTwoShot, shape, 2)
                                         : callOf(kind, shape, 2);
    call.located = true;
    const Program right = record<Half>(shape, {call, call});
    CHECK(order(right).proven());
    races("a location after its flag", hasty(right, isFlag(DeviceLayout::Of::kParts)));
    races("results before the sums", hasty(right, isFlag(DeviceLayout::Of::kResults)));
    // By the mapping thread of a rank whose own tensors nobody maps: it has not waited for the
    // thread.
    Call one_sided = call;
    one_sided.staged = 0b1100;
    CHECK(order(record<Half>(shape, {one_sided})).proven());
    races("acknowledged before it is mapped",
          record<Half>(shape, {one_sided}, {.acknowledges_early = true}));

    Program impatient = right;
    for (auto& lane : impatient.lanes)
      std::erase_if(lane, [&](const Step& step) {
        return step.what == Do::kWait && step.at / kRegion < 2 &&
               isFlag(DeviceLayout::Of::kResults)(step.at % kRegion);
      });
    races("a tensor used again before all results", impatient);

    Program early = record<Half>(shape, {one_sided});
    size_t moved = 0;
    for (auto& lane : early.lanes)
      for (size_t i = 1; i < lane.size(); ++i) {
        if (lane[i].what != Do::kAccess || lane[i - 1].what != Do::kWait) continue;
        Step looks{.what = Do::kAccess};
        std::erase_if(lane[i].reads, [&](const Range& range) {
          if (isTable(range)) looks.reads.push_back(range);
          return isTable(range);
        });
        if (looks.reads.empty()) continue;
        lane.insert(lane.begin() + static_cast<ptrdiff_t>(i) - 1, looks);
        ++i, ++moved;
      }
    CHECK(moved > 0);
    races("a look into the table before the flag", early);
  }
}

// In the NVSwitch, beside calls that use the same flags.  The windows are watched too.
TEST(every_state_of_small_sums_in_the_switch) {
  const auto inSwitch = [](const Shape& shape, size_t tiles, bool in_place = true) {
    Call call = callOf(DeviceAlgorithm::kTwoShot, shape, tiles);
    call.in_place = in_place;
    call.nvls = true;
    return call;
  };
  for (const Shape& shape :
       {Shape{.ranks = 2, .lanes = 2, .slot_bytes = 512}, Shape{.ranks = 3, .slot_bytes = 512},
        Shape{.ranks = 2, .channels = 2, .slot_bytes = 512}}) {
    const Call one = inSwitch(shape, 1), two = inSwitch(shape, 2),
               there = inSwitch(shape, 2, false);
    // Cut in another way: blocks get each other's places in the window.
    Call wide = inSwitch(shape, 1);
    wide.slice *= 2;
    wide.channels = 1;
    const Call pushed = callOf(DeviceAlgorithm::kTwoShot, shape, 2);
    holds("in the switch", record<Half>(shape, {one, there}));
    CHECK(order(record<Half>(shape, {two, wide, one, wide, there, two})).proven());
    CHECK(order(record<Half>(shape, {two, pushed, there, pushed, pushed, one})).proven());
    for (const Call& call : {one, there}) {
      CHECK(!order(record<Half>(shape, {call}, kWeakPublish)).races.empty());
      CHECK(!order(record<Half>(shape, {call}, kWeakObserve)).races.empty());
      if (shape.lanes == 1) continue;
      races("in the switch without a barrier before a flag",
            record<Half>(shape, {call}, {.forgets_sync = true}));
      races("in the switch without a barrier after a wait",
            record<Half>(shape, {call}, {.forgets_any = true}));
    }
    // Each of the two flags is needed: published before the copy in, or before the sums.
    const DeviceLayout layout{.ranks = shape.ranks,
                              .channels = shape.channels,
                              .slot_bytes = shape.slot_bytes,
                              .depth = shape.depth,
                              .part_bytes = shape.slot_bytes};
    for (const auto of : {DeviceLayout::Of::kParts, DeviceLayout::Of::kResults})
      CHECK(!order(hasty(record<Half>(shape, {two}), [&](size_t flag) {
               return flag >= layout.pushedFlag(0, of, 0) &&
                      flag <= layout.pushedFlag(0, of, shape.ranks - 1);
             })).races.empty());
  }
}

// LL's words carry their flags.  What has to be shown is that none is written over while a peer may
// still wait for it, beside all other calls, which share the flags that tell so.
TEST(all_executions_of_ll_are_in_order) {
  for (const Shape& shape : {Shape{.ranks = 2, .lanes = 3, .slot_bytes = 512, .ll_bytes = 1024},
                             Shape{.ranks = 2,
                                   .channels = 2,
                                   .slot_bytes = 512,
                                   .start = ~uint64_t{0} - 2,
                                   .ll_bytes = 1024},
                             Shape{.ranks = 4, .lanes = 2, .slot_bytes = 512, .ll_bytes = 1024},
                             Shape{.ranks = 8, .slot_bytes = 512, .ll_bytes = 512}}) {
    Call ll = callOf(DeviceAlgorithm::kOneShot, shape, 1);
    ll.ll = true;
    Call shorter = ll, there = ll, one = callOf(DeviceAlgorithm::kOneShot, shape, 3);
    shorter.count = 3;
    there.in_place = false;
    const Call two = callOf(DeviceAlgorithm::kTwoShot, shape, 2);
    const auto proven = [&](const std::vector<Call>& calls) {
      CHECK(order(record<Half>(shape, calls)).proven());
    };
    proven({ll, ll, there, ll, ll});
    proven({ll, shorter, shorter, ll, shorter, ll});
    proven({one, ll, two, ll, one, shorter, ll, two, two, there, ll});
    const std::vector<Call> calls{ll, ll, ll};
    CHECK(!order(record<Half>(shape, calls, {.ll_sets = 1})).races.empty());
    CHECK(!order(record<Half>(shape, calls, kWeakPublish)).races.empty());
    CHECK(!order(record<Half>(shape, calls, kWeakObserve)).races.empty());
  }
  const Shape small{.ranks = 2, .slot_bytes = 512, .ll_bytes = 512};
  Call ll = callOf(DeviceAlgorithm::kOneShot, small, 1);
  ll.ll = true;
  ll.count = 3;
  holds("LL", record<Half>(small, {ll, ll, ll, ll}));
  races("LL with one set of slots", record<Half>(small, {ll, ll, ll}, {.ll_sets = 1}));
}

// More ranks, lanes, channels and calls than can be visited state by state.
TEST(all_executions_of_mixed_kernels_are_in_order) {
  std::minstd_rand random(11);
  const auto draw = [&](int least, int most) {
    return least + static_cast<int>(random() % static_cast<unsigned>(most - least + 1));
  };
  size_t lanes = 0, steps = 0;
  constexpr int kPrograms = 150;
  for (int i = 0; i < kPrograms; ++i) {
    const bool wide = draw(0, 3) == 0;
    const Shape shape{.ranks = draw(2, 5),
                      .channels = draw(1, 3),
                      .lanes = draw(1, 4),
                      .depth = uint64_t{1} << draw(1, 2),
                      .slot_bytes = wide ? 512u : 128u,
                      // Some pass 2^64 on their way.
                      .start = draw(0, 1) ? ~uint64_t{0} - static_cast<uint64_t>(draw(0, 9)) : 0};
    std::vector<Call> calls;
    for (int k = draw(2, 5); k > 0; --k) {
      const auto algorithm = static_cast<DeviceAlgorithm>(draw(0, kDeviceAlgorithms - 1));
      const size_t whole = message(algorithm, shape.ranks, shape.channels, 3);
      calls.push_back({.algorithm = algorithm,
                       .count = static_cast<size_t>(draw(1, static_cast<int>(whole))),
                       .window = static_cast<size_t>(draw(1, static_cast<int>(shape.depth) - 1)),
                       .channels = draw(1, shape.channels),
                       .in_place = draw(0, 1) == 0,
                       .shift = static_cast<size_t>(draw(0, 3) ? 0 : draw(1, 15))});
      if (const int kind = draw(0, 5); kind < 3) {
        calls.back().kind = kOfParts[kind];
        calls.back().algorithm = DeviceAlgorithm::kTwoShot;
        calls.back().count = ceilDiv(calls.back().count, static_cast<size_t>(shape.ranks));
        calls.back().root = draw(0, shape.ranks - 1);
        calls.back().two_hops = kOfParts[kind] == Kind::kBroadcast && draw(0, 1) == 0;
      }
    }
    const Program program = wide ? record<Half>(shape, calls) : record<Byte>(shape, calls);
    const Order proof = order(program);
    CHECK_EQ(proof.wrong, "");
    CHECK(proof.races.empty());
    lanes += program.lanes.size();
    for (const auto& lane : program.lanes) steps += lane.size();
  }
  std::printf("%d programs, %zu lanes, %zu steps in order\n", kPrograms, lanes, steps);
}

// What push.h says of how many sets of slots each algorithm needs: with one less, what it says is
// written over while it may still be read is so.
TEST(push_sets_are_as_many_as_needed) {
  for (int ranks = 2; ranks <= 4; ++ranks) {
    const Shape shape{.ranks = ranks};
    const Call one = callOf(DeviceAlgorithm::kOneShot, shape, 4);
    const Call two = callOf(DeviceAlgorithm::kTwoShot, shape, 7);
    const auto none = [](PushRaces r) { return !r.parts && !r.results && !r.other; };
    CHECK(withSets(1, shape, {one}).parts);
    CHECK(none(withSets(2, shape, {one, one})));
    const PushRaces two_sets = withSets(2, shape, {two});
    CHECK(two_sets.parts);
    CHECK(two_sets.results);
    CHECK(!two_sets.other);
    CHECK(none(withSets(3, shape, {two, two})));
    CHECK(none(withSets(3, shape, {one, two, one, one, two, two})));
    CHECK(none(withSets(4, shape, {one, two, one, one, two, two})));
    const Call scatter = callOf(Kind::kReduceScatter, shape, 7);
    const Call gather = callOf(Kind::kAllGather, shape, 7);
    const Call broadcast = callOf(Kind::kBroadcast, shape, 7);
    CHECK(withSets(3, shape, {scatter}).parts);
    CHECK(withSets(3, shape, {gather}).results);
    CHECK(withSets(3, shape, {broadcast}).results);
    CHECK(none(withSets(4, shape, {scatter, one, scatter, two, gather, two, scatter, one})));
    CHECK(none(withSets(4, shape, {two, gather, broadcast, gather, two, broadcast, two, two})));
    const Call two_hops = callOf(Kind::kBroadcast, shape, 7, true);
    CHECK(withSets(2, shape, {two_hops}).results);
    CHECK(none(withSets(3, shape, {two_hops, two_hops, two, two_hops})));
    CHECK(
        none(withSets(4, shape, {two_hops, gather, two_hops, scatter, broadcast, two_hops, two})));
    // Where counters pass 2^64, three sets are not taken in turn.
    const Shape wraps{.ranks = ranks, .start = ~uint64_t{0} - 1};
    CHECK(withSets(3, wraps, {one}).parts);
    CHECK(none(withSets(4, wraps, {one, two})));
  }
}

// --- Mistakes put in ---

TEST(weak_memory_orders_are_found) {
  for (const DeviceAlgorithm algorithm :
       {DeviceAlgorithm::kOneShot, DeviceAlgorithm::kTwoShot, DeviceAlgorithm::kRing})
    for (int lanes = 1; lanes <= 2; ++lanes) {
      const Shape shape{.ranks = 2, .lanes = lanes};
      const std::vector<Call> calls{callOf(algorithm, shape, 3)};
      CHECK(order(record<Byte>(shape, calls)).proven());
      CHECK(!order(record<Byte>(shape, calls, kWeakPublish)).races.empty());
      CHECK(!order(record<Byte>(shape, calls, kWeakObserve)).races.empty());
    }
  for (const Kind kind : kOfParts) {
    const Shape shape{.ranks = 3, .lanes = 2};
    const std::vector<Call> calls{callOf(kind, shape, 3)};
    CHECK(order(record<Byte>(shape, calls)).proven());
    CHECK(!order(record<Byte>(shape, calls, kWeakPublish)).races.empty());
    CHECK(!order(record<Byte>(shape, calls, kWeakObserve)).races.empty());
    if (kind != Kind::kBroadcast) continue;
    const std::vector<Call> two_hops{callOf(kind, shape, 3, true)};
    CHECK(order(record<Byte>(shape, two_hops)).proven());
    CHECK(!order(record<Byte>(shape, two_hops, kWeakPublish)).races.empty());
    CHECK(!order(record<Byte>(shape, two_hops, kWeakObserve)).races.empty());
  }
}

TEST(too_few_sets_or_slots_taken_too_early_are_found) {
  const Shape two{.ranks = 2};
  races("one-shot with one set",
        record<Byte>(two, {callOf(DeviceAlgorithm::kOneShot, two, 3)}, {.sets = 1}));
  races("two-shot with two sets",
        record<Byte>(two, {callOf(DeviceAlgorithm::kTwoShot, two, 6)}, {.sets = 2}));
  const Mutant early{.early_reuse = 1};
  const Shape three{.ranks = 3}, deep{.ranks = 2, .depth = 4};
  races("ring of 3 that fills a slot too early",
        record<Byte>(three, {callOf(DeviceAlgorithm::kRing, three, 4)}, early));
  races("ring of 2 that fills a slot too early",
        record<Byte>(deep, {callOf(DeviceAlgorithm::kRing, deep, 6, 3)}, early));
  // Two ranks answer each other: with room for two windows nobody can get ahead of its peer's
  // reads, and what it is told of empty slots is never news.
  holds("ring of 2 with slots to spare, early or not",
        record<Byte>(two, {callOf(DeviceAlgorithm::kRing, two, 4)}, early));
}

TEST(forgotten_barriers_are_found) {
  for (const DeviceAlgorithm algorithm :
       {DeviceAlgorithm::kOneShot, DeviceAlgorithm::kTwoShot, DeviceAlgorithm::kRing})
    for (const Mutant& how : {Mutant{.forgets_sync = true}, Mutant{.forgets_any = true}}) {
      const Shape shape{.ranks = 2, .lanes = 2};
      races(how.forgets_sync ? "no barrier before a flag" : "no barrier after a wait",
            record<Byte>(shape, {callOf(algorithm, shape, 2)}, how));
    }
  for (const Kind kind : kOfParts)
    for (const Mutant& how : {Mutant{.forgets_sync = true}, Mutant{.forgets_any = true}})
      races(name(kind),
            record<Byte>({.ranks = 2, .lanes = 2}, {callOf(kind, {.ranks = 2}, 2)}, how));
}

TEST(flags_published_too_early_are_found) {
  const Shape shape{.ranks = 3, .lanes = 2};
  const DeviceLayout layout{
      .ranks = 3, .channels = 1, .slot_bytes = 128, .depth = 2, .part_bytes = 128};
  const auto ring = record<Byte>(shape, {callOf(DeviceAlgorithm::kRing, shape, 2)});
  const auto push = record<Byte>(shape, {callOf(DeviceAlgorithm::kTwoShot, shape, 1)});
  holds("the ring as it is", ring);
  races("released before it is read",
        hasty(ring, [&](size_t flag) { return flag == layout.emptiedFlag(0); }));
  races("posted before it is written",
        hasty(ring, [&](size_t flag) { return flag == layout.filledFlag(0); }));
  for (const auto of : {DeviceLayout::Of::kParts, DeviceLayout::Of::kResults})
    races("pushed before it is written", hasty(push, [&](size_t flag) {
            return flag >= layout.pushedFlag(0, of, 0) && flag <= layout.pushedFlag(0, of, 2);
          }));
}

TEST(a_window_that_fills_all_slots_deadlocks) {
  for (int ranks = 2; ranks <= 3; ++ranks)
    for (const uint64_t depth : {1, 2}) {
      const Shape shape{.ranks = ranks, .depth = depth};
      const Program program =
          record<Byte>(shape, {callOf(DeviceAlgorithm::kRing, shape, 4, depth)});
      CHECK(!order(program).wrong.empty());
      const Explored found = everyState("ring with a window as long as its slots", program);
      CHECK(found.deadlock);
      CHECK(!found.race);
    }
}
