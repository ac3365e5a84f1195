// What the GPU's kernels compute, run by threads of the host (host_block.h): all-reduces of every
// kind give the bits that the CPU gives, whatever the algorithm, the shape and where tensors lie,
// and move the bytes that each algorithm's header says.  Their protocol under delays and with
// mistakes put in is device_protocol_test.cc's.
#include <bit>
#include <map>
#include <random>
#include <span>
#include <tuple>
#include <vector>

#include "check.h"
#include "cuda/kernels/gpu_tuning.h"
#include "cuda/kernels/stream_kernels.h"
#include "device_calls.h"
#include "kernels/reduce.h"
#include "ranks.h"

using namespace host;
using oracle::Case;

namespace {

static_assert(slicesOf(0, 4, 5) == 2 && slicesOf(1, 4, 5) == 1 && slicesOf(3, 4, 3) == 0);

// Where the parts of a rank's device memory lie.
namespace layout_check {
constexpr DeviceLayout kSome{
    .ranks = 3, .channels = 2, .slot_bytes = 256, .depth = 4, .part_bytes = 128, .ll_bytes = 384};
static_assert(kSome.emptiedFlag(0) == kSome.filledFlag(0) + sizeof(Flag));
static_assert(kSome.pushedFlag(0, DeviceLayout::Of::kResults, 2) + sizeof(Flag) ==
              kSome.filledFlag(1));
static_assert(kSome.pushedFlag(1, DeviceLayout::Of::kResults, 2) + sizeof(Flag) ==
              kSome.ringBegin());
static_assert(kSome.ringSlot(1, 3) + 256 == kSome.pushBegin());
static_assert(kSome.pushSlot(0, DeviceLayout::Of::kParts, 3, 2) + 128 ==
              kSome.pushSlot(0, DeviceLayout::Of::kResults, 0, 0));
static_assert(kSome.pushSlot(1, DeviceLayout::Of::kResults, 3, 2) + 128 == kSome.llSlot(0, 0, 0));
static_assert(kSome.llSlot(0, 1, 2) + 384 == kSome.llSlot(1, 0, 0));
static_assert(kSome.llSlot(1, 1, 2) + 384 == kSome.bytes());
}  // namespace layout_check

// That every setting gets numbers which the protocol and a GPU allow.
namespace tuning_check {
// LL's slots hold a channel's share of every message, each 4 bytes beside a flag.
constexpr bool llFits(const Tuning& t) {
  return 2 * llShapeOf(t, kLLMost / 2).slice * 2 <= t.ll_bytes &&
         2 * llShapeOf(t, kLLMost / 4).slice * 4 <= t.ll_bytes;
}
constexpr bool sound(const Setting& s) {
  const Tuning t = tune(s);
  return std::has_single_bit(t.depth) && t.depth >= 2 * t.window && t.slot_bytes % kLine == 0 &&
         t.part_bytes % kLine == 0 && t.part_bytes >= kChunkElements * 8 &&
         t.slot_bytes >= kChunkElements * 8 && t.channels <= kMostChannels &&
         t.ll_bytes % kLine == 0 && llFits(t) && t.ll_most <= t.one_shot_most &&
         t.layout(s.ranks).bytes() <= size_t{120} << 20 &&
         t.channels * s.ranks_on_device <= std::max(1, s.multiprocessors / 2);
}
static_assert(sound({.ranks = 2}) && sound({.ranks = 8}) && sound({.ranks = 16}));
static_assert(sound({.ranks = 2, .ranks_on_device = 2}) &&
              sound({.ranks = 4, .ranks_on_device = 4}));
static_assert(sound({.ranks = 8, .multiprocessors = 28, .all_to_all = false}));
}  // namespace tuning_check

// Of the call kinds: float32, and what reduce_n.h moves in another way.  Each dtype compiles for
// seconds; tests/cuda/torch_on_fake adds all dtypes, with the kernels that are installed.
constexpr DType kTested[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kInt8,
                             DType::kBool};
// Of the direct schedule: each kind of element that elements.h tells apart.
constexpr DType kAdded[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16,
                            DType::kInt8,    DType::kInt64,   DType::kBool};
constexpr DeviceAlgorithm kAllAlgorithms[] = {DeviceAlgorithm::kOneShot, DeviceAlgorithm::kTwoShot,
                                              DeviceAlgorithm::kRing};

// A slot is as small as it may be: a few thousand elements take many.
constexpr Tuning tuned(int blocks, uint64_t depth) {
  return {.channels = blocks,
          .slot_bytes = 1024,
          .depth = depth,
          .window = 1,
          .part_bytes = 1024,
          .one_shot_most = 0,
          .two_shot_most = 0,
          .ll_bytes =
              2 * sizeof(float) * roundUp(ceilDiv(oracle::kMost, size_t(blocks)), kChunkElements),
          .ll_most = 0,
          .window_bytes = oracle::kMost * 8 * size_t{8},
          .located_least = 0,
          .parts_located = 0,
          .shared_lead = 0};
}

std::vector<uint64_t> runAll(Calls& calls, const Shape& shape) {
  return [&]<size_t... i>(std::index_sequence<i...>) {
    return host::run(shape, calls.count(), [&](host::Block& block, int r, int c, size_t kernel) {
      calls.at<DeviceRules, Compiled{}, kTested[i]...>(block, r, c, kernel);
    });
  }(std::make_index_sequence<std::size(kTested)>());
}

// The bytes that each rank moves in this call, which must give what it promises.
std::vector<uint64_t> movedBy(const Call& call, int P) {
  Ranks ranks(tuned(call.blocks, 2).layout(P));
  Calls calls(ranks);
  calls.add(call);
  std::vector<uint64_t> moved = runAll(calls, {P, call.blocks, 2});
  calls.verify();
  return moved;
}

template <class Visit>
void forEachPair(std::span<const DType> dtypes, Visit visit) {
  for (DType dtype : dtypes)
    for (int op = 0; op < kReduceOps; ++op)
      if (isSupported(dtype, static_cast<ReduceOp>(op))) visit(dtype, static_cast<ReduceOp>(op));
}

// A call of this kind whose other properties are drawn.
Call drawn(Kind kind, DeviceAlgorithm algorithm, const Case& numbers, const Tuning& t,
           std::mt19937& random) {
  const auto die = [&](size_t sides) { return random() % sides; };
  const auto P = static_cast<size_t>(numbers.P);
  const size_t counts[] = {0,    1,    kChunkElements - 1, P * kChunkElements, P * 384,
                           1021, 2500, oracle::kMost - 1,  oracle::kMost,      die(oracle::kMost)};
  Call call{.kind = kind,
            .algorithm = algorithm,
            .numbers = &numbers,
            .count = counts[die(std::size(counts))],
            .root = static_cast<int>(die(P))};
  if (call.kind == Kind::kAllReduce) {
    const size_t value_bytes = isHalf(numbers.dtype) ? sizeof(float) : numbers.width();
    if (die(2) == 0)
      call.slice = sliceOf(t, algorithm, call.count, numbers.P, numbers.width(), value_bytes);
    call.blocks = channelsOf(t, algorithm, call.count, numbers.P, call.slice);
    call.located = algorithm == DeviceAlgorithm::kTwoShot && die(2) == 0;
    if (call.located && die(2) == 0) {
      const PartShape shape = locatedShapeOf(t, call.count, numbers.P, numbers.width());
      call.slice = shape.slice;
      call.blocks = shape.channels;
    }
  } else {
    call.count = std::min(call.count, oracle::kMost / P);
    const size_t unit = call.moves() ? unitBytes(call.unit()) : numbers.width();
    call.two_hops = call.kind == Kind::kBroadcast && die(2) == 0;
    call.located = call.kind != Kind::kBroadcast && die(2) == 0;
    const size_t units = call.partBytes() / unit;
    const PartShape shape = call.located && die(2) == 0
                                ? locatedPartShapeOf(t, units, numbers.P, unit)
                                : partShapeOf(t, units, numbers.P, unit, call.two_hops);
    if (die(2) == 0) call.slice = shape.slice;
    call.blocks = shape.channels;
  }
  call.window = 1 + die(t.depth - 1);
  call.in_place = die(2) == 0;
  call.place = static_cast<Alignment>(die(4));
  call.fixed = call.canBeFixed() && die(4) > 0;
  // Of some ranks, or none, or all.
  call.staged = die(2) == 0 ? static_cast<uint32_t>(random()) : die(2) == 0 ? 0 : ~uint32_t{0};
  call.ll = call.fixed && call.kind == Kind::kAllReduce && algorithm == DeviceAlgorithm::kOneShot &&
            die(2) == 0;
  call.nvls = call.canBeNvls() && die(3) == 0;
  if (call.nvls) call.fixed = call.located = false;
  call.device_factor = die(2) == 0;
  return call;
}

}  // namespace

// Every dtype and operation by every algorithm, and the calls that are no all-reduce; sizes,
// alignments and the rest are drawn.  All calls of a shape go through the same memory, in an order
// that mixes them.
// It was slower at every size that was measured in one GPU's memory.
TEST(the_ring_is_for_gpus_that_are_not_linked) {
  const auto algorithm = [](const Setting& setting, size_t bytes) {
    return chooseKernel(tune(setting), bytes);
  };
  constexpr size_t kMiB = 1 << 20;
  for (const int ranks : {2, 3, 8}) {
    Setting setting{.ranks = ranks};
    CHECK(algorithm(setting, 64 * kMiB + 1) == DeviceAlgorithm::kTwoShot);
    CHECK(algorithm(setting, SIZE_MAX) == DeviceAlgorithm::kTwoShot);
    setting.linked = false;
    CHECK(algorithm(setting, 64 * kMiB) == DeviceAlgorithm::kTwoShot);
    CHECK(algorithm(setting, 64 * kMiB + 1) == DeviceAlgorithm::kRing);
    setting.all_to_all = false;
    CHECK(algorithm(setting, 2 * kMiB) == DeviceAlgorithm::kRing);
  }
}

TEST(all_kinds_of_calls_give_the_canonical_bits) {
  struct World {
    Shape shape;
    uint64_t depth, start;
    int weight;  // its share of the calls
  };
  constexpr uint64_t kWraps = ~uint64_t{0} - 2;
  constexpr World kWorlds[] = {
      {{2, 1, 1}, 2, 0, 6},      {{2, 4, 1}, 4, kWraps, 6}, {{3, 1, 4}, 4, kWraps, 5},
      {{3, 3, 1}, 2, 0, 5},      {{4, 2, 1}, 2, kWraps, 5}, {{4, 1, 4}, 4, 0, 4},
      {{5, 1, 1}, 4, kWraps, 4}, {{6, 2, 1}, 2, 0, 2},      {{7, 1, 1}, 2, kWraps, 2},
      {{8, 1, 1}, 4, 0, 2},      {{8, 4, 4}, 2, kWraps, 1},
  };
  std::vector<size_t> deck;
  for (size_t w = 0; w < std::size(kWorlds); ++w)
    deck.insert(deck.end(), static_cast<size_t>(kWorlds[w].weight), w);
  std::mt19937 random(20);
  std::map<size_t, std::vector<std::tuple<Kind, DeviceAlgorithm, DType, ReduceOp>>> hands;
  const auto deal = [&](Kind kind, DeviceAlgorithm algorithm, DType dtype, ReduceOp op) {
    hands[deck[random() % deck.size()]].emplace_back(kind, algorithm, dtype, op);
  };
  forEachPair(kTested, [&](DType dtype, ReduceOp op) {
    for (DeviceAlgorithm algorithm : kAllAlgorithms)
      if (hasKernel(algorithm, dtype)) deal(Kind::kAllReduce, algorithm, dtype, op);
    for (int again = 0; again < 2; ++again)
      deal(Kind::kReduceScatter, DeviceAlgorithm::kTwoShot, dtype, op);
    if (op == ReduceOp::kSum)
      for (Kind kind : {Kind::kAllGather, Kind::kBroadcast, Kind::kAllGather, Kind::kBroadcast})
        deal(kind, DeviceAlgorithm::kTwoShot, dtype, op);
  });
  for (auto& [w, hand] : hands) {
    const World& world = kWorlds[w];
    const Tuning t = tuned(world.shape.blocks, world.depth);
    Ranks ranks(t.layout(world.shape.ranks), world.start);
    Calls calls(ranks);
    std::map<std::pair<DType, ReduceOp>, Case> cases;
    std::shuffle(hand.begin(), hand.end(), random);
    for (const auto& [kind, algorithm, dtype, op] : hand) {
      const auto [numbers, fresh] = cases.try_emplace({dtype, op}, world.shape.ranks, dtype, op);
      calls.add(drawn(kind, algorithm, numbers->second, t, random));
    }
    runAll(calls, world.shape);
    calls.verify();
  }
  CHECK_EQ(hands.size(), std::size(kWorlds));
}

// The same addends by the CPU's own ring and by every algorithm here.
TEST(bits_are_those_of_the_cpus_ring) {
  constexpr int P = 3;
  constexpr size_t kCount = 1000;
  std::vector<Case> cases;
  forEachPair(kTested, [&](DType dtype, ReduceOp op) { cases.emplace_back(P, dtype, op); });
  std::vector<std::vector<Bytes>> by_cpu(P);
  {
    const ::ranks::Setting ring("RINGREDUCE_ALGORITHM", "ring");
    ::ranks::inGroup(P, [&](Group& group) {
      for (const Case& c : cases) {
        Bytes data = c.addends[static_cast<size_t>(group.rank())];
        data.resize(kCount * c.width());
        group.run({AllReduce{data.data(), kCount, c.dtype, c.op, oracle::factorOf(group.rank())}});
        by_cpu[static_cast<size_t>(group.rank())].push_back(data);
      }
    });
  }
  const Tuning t = tuned(1, 2);
  for (DeviceAlgorithm algorithm : kAllAlgorithms) {
    Ranks ranks(t.layout(P));
    Calls calls(ranks);
    std::vector<size_t> added;
    for (size_t i = 0; i < cases.size(); ++i) {
      if (!hasKernel(algorithm, cases[i].dtype)) continue;
      calls.add({.algorithm = algorithm, .numbers = &cases[i], .count = kCount});
      added.push_back(i);
    }
    runAll(calls, {P, 1, 1});
    for (size_t k = 0; k < added.size(); ++k)
      for (int r = 0; r < P; ++r)
        cases[added[k]].expect(calls.tensors(k, r).result(),
                               by_cpu[static_cast<size_t>(r)][added[k]], "by GPU and by CPU");
  }
}

// And the same parts by the CPU's reduce-scatter, of which it promises the same.
TEST(parts_are_those_of_the_cpus_reduce_scatter) {
  constexpr int P = 3;
  constexpr size_t kCount = 700;
  std::vector<Case> cases;
  forEachPair(kTested, [&](DType dtype, ReduceOp op) { cases.emplace_back(P, dtype, op); });
  std::vector<std::vector<Bytes>> by_cpu(P);
  ::ranks::inGroup(P, [&](Group& group) {
    const int me = group.rank();
    for (const Case& c : cases) {
      Bytes out(kCount * c.width());
      std::vector<const void*> parts;
      for (size_t p = 0; p < P; ++p)
        parts.push_back(c.addends[static_cast<size_t>(me)].data() + p * out.size());
      group.run({ReduceScatter{.inputs = parts,
                               .counts = std::vector<size_t>(P, kCount),
                               .output = out.data(),
                               .dtype = c.dtype,
                               .op = c.op,
                               .factor = oracle::factorOf(me)}});
      by_cpu[static_cast<size_t>(me)].push_back(out);
    }
  });
  Ranks ranks(tuned(2, 2).layout(P));
  Calls calls(ranks);
  for (const Case& c : cases)
    calls.add({.kind = Kind::kReduceScatter, .numbers = &c, .count = kCount, .blocks = 2});
  runAll(calls, {P, 2, 1});
  for (size_t i = 0; i < cases.size(); ++i)
    for (int r = 0; r < P; ++r)
      cases[i].expect(calls.tensors(i, r).result(), by_cpu[static_cast<size_t>(r)][i],
                      "reduce-scatter by GPU and by CPU");
}

// The direct schedule's kernels, without its streams: scaled copies where leaders can read them,
// sums by every rank as a leader of its part, and those sums at everybody.
TEST(direct_gives_the_canonical_bits_with_the_fewest_bytes) {
  std::mt19937 random(30);
  constexpr size_t kCounts[] = {1, 128, 1021, 2560, oracle::kMost};
  forEachPair(kAdded, [&](DType dtype, ReduceOp op) {
    const int P = 2 + static_cast<int>(random() % 4);
    const Case numbers(P, dtype, op);
    const size_t count = kCounts[random() % std::size(kCounts)], shift = random() % 2;
    const int blocks = 1 + static_cast<int>(random() % 3);
    const bool on_device = random() % 2 == 0, in_pieces = random() % 2 == 0;
    const Shape shape{P, blocks, 2};
    const size_t bytes = count * numbers.width();
    std::deque<Tensor> staged, outputs;
    AbortFlag nobody_gives_up{};
    DirectCall call{.size = P,
                    .sinks = P,
                    .chunk = Cut{count, P}.chunkSize(),
                    .begin = 0,
                    .elements = 0,
                    .first = 0,
                    .tensors = {},
                    .arithmetic = {combineOf(dtype, op), op == ReduceOp::kAvg, false, P, 1},
                    .abort = &nobody_gives_up};
    for (int r = 0; r < P; ++r) {
      call.tensors.input[r] = reinterpret_cast<std::byte*>(staged.emplace_back(bytes, 0).data());
      call.tensors.output[r] =
          reinterpret_cast<std::byte*>(outputs.emplace_back(bytes, shift * numbers.width()).data());
    }
    const auto with = [&]<DType d>() {
      if (dtype != d) return;
      host::run(shape, 1, [&](host::Block& block, int r, int channel, size_t) {
        const auto* from = numbers.addends[static_cast<size_t>(r)].data();
        const double factor = oracle::factorOf(r);
        const auto lying = static_cast<typename Element<d>::Value>(factor);
        const CopyCall copy{
            reinterpret_cast<const std::byte*>(from),
            reinterpret_cast<std::byte*>(staged[static_cast<size_t>(r)].data()),
            count,
            {Combine::kAdd, false, op == ReduceOp::kPremulSum, P, on_device ? 1e9 : factor},
            &nobody_gives_up,
            on_device ? &lying : nullptr};
        copyIn<Element<d>>(block, copy, channel, blocks);
      });
      const auto moved = host::run(shape, 1, [&](host::Block& block, int r, int channel, size_t) {
        DirectCall mine = call;
        const size_t each = roundUp(ceilDiv(count, static_cast<size_t>(P)), kChunkElements);
        const Span part = piece(count, each, static_cast<size_t>(r));
        mine.begin = part.begin;
        mine.elements = part.size;
        if (in_pieces) {
          mine.first = part.begin;
          for (int p = 0; p < P; ++p) {
            mine.tensors.input[p] += part.begin * numbers.width();
            mine.tensors.output[p] += part.begin * numbers.width();
          }
        }
        direct<Element<d>>(block, mine, block.peers(), channel, blocks);
      });
      uint64_t all = 0;
      for (uint64_t m : moved) all += m;
      CHECK_EQ(all, static_cast<uint64_t>(P) * 2 * bytes);
    };
    [&]<size_t... i>(std::index_sequence<i...>) {
      (with.template operator()<kAdded[i]>(), ...);
    }(std::make_index_sequence<std::size(kAdded)>());
    for (Tensor& output : outputs) {
      numbers.expect(output.bytes(), numbers.canonical(count), "direct");
      CHECK(output.intactAround());
    }
  });
}

// Each algorithm's header says how many bytes a rank moves; of messages that the cut and the slices
// divide evenly that is exact.
TEST(kernels_move_the_bytes_that_their_headers_say) {
  for (int P : {2, 3, 4, 7})
    for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kFloat64})
      for (int blocks : {1, 2}) {
        const Case numbers(P, dtype, ReduceOp::kSum);
        const auto p = static_cast<uint64_t>(P);
        const size_t count = 2 * p * kChunkElements * static_cast<size_t>(blocks);
        const uint64_t S = count * numbers.width();
        if (count > oracle::kMost) continue;
        // By each kernel that there is.
        const auto moves = [&](DeviceAlgorithm algorithm, uint64_t bytes, bool ll = false,
                               bool nvls = false) {
          Call call{.algorithm = algorithm, .numbers = &numbers, .count = count, .blocks = blocks};
          for (bool fixed : {false, true}) {
            if (fixed ? nvls || !call.canBeFixed() : ll) continue;
            if (nvls && !call.canBeNvls()) continue;
            call.fixed = fixed;
            call.ll = ll;
            call.nvls = nvls;
            for (uint64_t moved : movedBy(call, P)) CHECK_EQ(moved, bytes);
          }
        };
        moves(DeviceAlgorithm::kOneShot, (2 * p + 1) * S);
        moves(DeviceAlgorithm::kOneShot, 3 * S, true);  // and words, which are not counted
        moves(DeviceAlgorithm::kTwoShot, 2 * S + 4 * (p - 1) * S / p);
        moves(DeviceAlgorithm::kTwoShot, 6 * S, false, true);
        const uint64_t around = (6 * p - 4) * S / p;
        moves(DeviceAlgorithm::kRing, isHalf(dtype) ? around + 2 * (p - 1) * S / p : around);
      }
}

// Ranks whose tensors are mapped beside others whose tensors are not, or of which only one is.
TEST(located_tensors_are_copied_only_where_they_are_not_mapped) {
  for (int P = 2; P <= 8; ++P)
    for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kInt8})
      for (const uint32_t staged : {0u, ~0u, 0b11u, 0b0110u, 0b100100u})
        for (bool in_place : {false, true}) {
          constexpr int kBlocks = 2;
          const Case numbers(P, dtype, ReduceOp::kSum);
          const auto p = static_cast<uint64_t>(P);
          Call call{.numbers = &numbers,
                    .count = 4 * p * kChunkElements,
                    .blocks = kBlocks,
                    .in_place = in_place,
                    .located = true,
                    .staged = staged};
          call.count =
              std::min(call.count, oracle::kMost / (p * kChunkElements) * p * kChunkElements);
          const uint64_t S = call.partBytes();
          for (const bool fixed : {false, true}) {
            if (fixed && !call.canBeFixed()) continue;
            call.fixed = fixed;
            const std::vector<uint64_t> moved = movedBy(call, P);
            for (uint64_t r = 0; r < p; ++r) {
              const uint64_t copies = static_cast<uint64_t>(std::popcount(staged >> 2 * r & 3));
              CHECK_EQ(moved[r], 2 * S + copies * 2 * (p - 1) * S / p);
            }
          }
        }
}

TEST(located_parts_are_copied_only_where_they_are_not_mapped) {
  for (int P = 2; P <= 8; ++P)
    for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kInt8})
      for (const uint32_t staged : {0u, ~0u, 0b11u, 0b0110u, 0b100100u})
        for (const Kind kind : {Kind::kReduceScatter, Kind::kAllGather})
          for (bool in_place : {false, true}) {
            constexpr int kBlocks = 2;
            const Case numbers(P, dtype, ReduceOp::kSum);
            const auto p = static_cast<uint64_t>(P);
            // A tail in the last turn.
            Call call{.kind = kind,
                      .numbers = &numbers,
                      .count = 3 * kChunkElements + 16,
                      .blocks = kBlocks,
                      .in_place = in_place,
                      .located = true,
                      .staged = staged};
            const uint64_t part = call.partBytes();
            for (const bool fixed : {false, true}) {
              if (fixed && !call.canBeFixed()) continue;
              call.fixed = fixed;
              const std::vector<uint64_t> moved = movedBy(call, P);
              const bool gathers = kind == Kind::kAllGather;
              for (uint64_t r = 0; r < p; ++r) {
                const uint64_t copies = staged >> (2 * r + gathers) & 1;
                const uint64_t own = gathers && in_place ? 0 : 1;
                CHECK_EQ(moved[r], (p + own + copies * 2 * (p - 1)) * part);
              }
            }
          }
}

TEST(calls_of_parts_move_the_bytes_that_their_headers_say) {
  for (int P : {2, 3, 5})
    for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kInt8})
      for (int blocks : {1, 2}) {
        const Case numbers(P, dtype, ReduceOp::kSum);
        const auto p = static_cast<uint64_t>(P);
        const size_t count = 2 * kChunkElements * static_cast<size_t>(blocks);
        const uint64_t part = count * numbers.width();
        const auto moved = [&](Kind kind, bool in_place, bool two_hops = false) {
          return movedBy({.kind = kind,
                          .numbers = &numbers,
                          .count = two_hops ? p * count : count,
                          .blocks = blocks,
                          .in_place = in_place,
                          .root = 1,
                          .two_hops = two_hops},
                         P);
        };
        for (bool in_place : {false, true}) {
          const std::vector<uint64_t> all(p, (3 * p - 1) * part);
          CHECK(moved(Kind::kReduceScatter, in_place) == all);
          const std::vector<uint64_t> gathered(p, (3 * p - 1 - in_place) * part);
          CHECK(moved(Kind::kAllGather, in_place) == gathered);
        }
        std::vector<uint64_t> from_root(p, 2 * part);
        from_root[1] = p * part;
        CHECK(moved(Kind::kBroadcast, true) == from_root);
        const std::vector<uint64_t> in_two_hops(p, (3 * p - 2) * part);
        CHECK(moved(Kind::kBroadcast, true, true) == in_two_hops);
      }
}

// Halves become floats, and floats halves, by the very bits that the CPU's kernels make, NaNs
// included: all halves, all floats next to a half or half way to the next one, and random ones.
TEST(halves_are_converted_as_on_the_cpu) {
  const auto check = [&]<DType dtype>() {
    using E = Element<dtype>;
    const ReduceKernels& cpu = reduceKernels(dtype, ReduceOp::kSum);
    std::vector<uint16_t> halves(1 << 16);
    for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
    std::vector<uint32_t> floats(halves.size());
    cpu.widen(floats.data(), halves.data(), halves.size());
    for (size_t i = 0; i < halves.size(); ++i)
      CHECK_EQ(std::bit_cast<uint32_t>(E::widen(halves[i])), floats[i]);

    std::vector<uint32_t> values;
    for (size_t i = 0; i + 1 < floats.size(); ++i)
      for (uint32_t near : {0u, 1u, 2u}) {
        values.push_back(floats[i] + near - 1);
        values.push_back(floats[i] + (floats[i + 1] - floats[i]) / 2 + near - 1);
      }
    std::mt19937 random(40);
    for (int i = 0; i < 1 << 20; ++i) values.push_back(static_cast<uint32_t>(random()));
    // Nothing but a rounding: x + -0 is x.
    const std::vector<uint16_t> zeros(values.size(), 0x8000);
    std::vector<uint16_t> rounded(values.size());
    cpu.finish(rounded.data(), values.data(), zeros.data(), values.size(), 1);
    for (size_t i = 0; i < values.size(); ++i)
      CHECK_EQ(E::narrow(std::bit_cast<float>(values[i])), rounded[i]);
  };
  check.operator()<DType::kFloat16>();
  check.operator()<DType::kBFloat16>();
}
