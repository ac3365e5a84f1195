// The protocol of the GPU's kernels, run by threads of the host (host_block.h): calls of all
// algorithms one after the other on the same memory, with random delays; waits that never end
// otherwise; and mutants that must be caught (mutants.h).  Each mutant is a copy of the kernels, so
// only the program device_protocol_mutants has them.
#define CHECK_OWN_MAIN
#include <array>
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <random>
#include <source_location>
#include <string_view>
#include <thread>

#include "device_calls.h"
#include "mutants.h"
#include "ranks.h"

using namespace host;
using oracle::Case;

namespace {

// Nanoseconds: of waits that must not end by a deadline, and of those that must.
constexpr uint64_t kLong = 20'000'000'000, kGiveUp = 2'000'000'000;
constexpr uint64_t kWraps = ~uint64_t{0} - 4;

struct Delayed : DeviceRules {
  static void delay() { mutants::randomDelay(); }
};
struct WeakPublish : Delayed {
  static constexpr auto kPublish = std::memory_order_relaxed;
};
struct WeakObserve : Delayed {
  static constexpr auto kObserve = std::memory_order_relaxed;
};
// Flags that may come before their data.
struct TornWords : Delayed {
  template <class Rules>
  static void storeWords(uint64_t* to, uint64_t first, uint64_t second) {
    for (const uint64_t word : {first, second}) {
      auto* const halves = reinterpret_cast<uint32_t*>(to++);
      std::atomic_ref(halves[1]).store(static_cast<uint32_t>(word >> 32));
      Rules::delay();
      std::atomic_ref(halves[0]).store(static_cast<uint32_t>(word));
    }
  }
};
struct EarlyReuse : Delayed {
  static constexpr uint64_t kEarlyReuse = 1;
};
template <uint64_t n>
struct Sets : Delayed {
  static constexpr uint64_t kSets = n;
};

// Where the algorithms' barriers are: finish() before a ring's flags are published, post() before
// those of a push, until() after what one lane has waited for, leaveKernel() at a block's end.
enum class Site { kFinish, kPost, kUntil, kLeave };
constexpr std::string_view kCallers[] = {"::finish(", "::post(", "::until(", "::leaveKernel("};

// A block without the barrier of one of them; in until() that is the one of a vote.  The site is
// not a template argument: the kernels are compiled once for all sites.
class Barrierless : public host::Block {
 public:
  static inline Site site;

  using From = std::source_location;
  using host::Block::Block;
  void sync(From from = From::current()) {
    if (!isAt(from)) Block::sync();
  }
  bool any(bool x, From from = From::current()) {
    if (site == Site::kUntil && isAt(from)) return false;
    return Block::any(x);
  }

 private:
  static bool isAt(From from) {
    const std::string_view caller = from.function_name();
    return caller.find(kCallers[static_cast<int>(site)]) != caller.npos;
  }
};

// Primitives that give a slot back and then read it.
template <class E, class Rules, class B>
struct EarlyRelease : DevicePrimitives<E, Rules, B> {
  using DevicePrimitives<E, Rules, B>::DevicePrimitives;
  void recv(int chunk, size_t j) {
    if (!this->await(true, false)) return;
    const std::byte* slot = this->slot();
    this->receiver_.release(this->block_.thread() == 0);
    Rules::delay();
    const Span s = this->span(chunk, j);
    copyElements<E>(this->block_, s.size, slot, Spans<1>{{this->output(s)}});
    this->block_.sync();
  }
};

// Primitives that forget to add one slice.
template <class E, class Rules, class B>
struct SkippedSlice : DevicePrimitives<E, Rules, B> {
  using Right = DevicePrimitives<E, Rules, B>;
  using Right::Right;
  void recvReduceCopySend(int chunk, size_t j) {
    if (j == 1)
      Right::recvCopySend(chunk, j);
    else
      Right::recvReduceCopySend(chunk, j);
  }
};

DeviceLayout layoutOf(const Shape& shape, uint64_t depth) {
  return {.ranks = shape.ranks,
          .channels = shape.blocks,
          .slot_bytes = 512,
          .depth = depth,
          .part_bytes = 512,
          // Some calls have one block.
          .ll_bytes = 2 * sizeof(float) * roundUp(oracle::kMost, kChunkElements),
          .window_bytes =
              static_cast<size_t>(shape.ranks * shape.blocks) * kChunkElements * sizeof(float)};
}

// What is needed of numbers here: one dtype whose wire is its own, and one that is widened.
// Integers are only moved.
const Case& numbersOf(int P, DType dtype = DType::kFloat32) {
  static std::mutex mutex;
  static std::map<std::pair<int, DType>, Case> cases;
  const std::lock_guard lock(mutex);
  return cases.try_emplace({P, dtype}, P, dtype, isHalf(dtype) ? ReduceOp::kAvg : ReduceOp::kSum)
      .first->second;
}

// A kind of call, and an all-reduce's algorithm.
struct How {
  Kind kind;
  DeviceAlgorithm algorithm = DeviceAlgorithm::kTwoShot;
  bool two_hops = false;
  bool located = false;
  bool ll = false;
  bool nvls = false;
};
constexpr How kOneShot{Kind::kAllReduce, DeviceAlgorithm::kOneShot};
constexpr How kTwoShot{Kind::kAllReduce, DeviceAlgorithm::kTwoShot};
constexpr How kRing{Kind::kAllReduce, DeviceAlgorithm::kRing};
constexpr How kReduceScatter{Kind::kReduceScatter}, kAllGather{Kind::kAllGather},
    kBroadcast{Kind::kBroadcast},
    kTwoHopBroadcast{Kind::kBroadcast, DeviceAlgorithm::kTwoShot, true};
constexpr How kLocated{Kind::kAllReduce, DeviceAlgorithm::kTwoShot, false, true};
constexpr How kLocatedScatter{Kind::kReduceScatter, DeviceAlgorithm::kTwoShot, false, true};
constexpr How kLocatedGather{Kind::kAllGather, DeviceAlgorithm::kTwoShot, false, true};
constexpr How kLL{Kind::kAllReduce, DeviceAlgorithm::kOneShot, false, false, true};
constexpr How kNvls{Kind::kAllReduce, DeviceAlgorithm::kTwoShot, false, false, false, true};
constexpr std::array kAll{kOneShot,   kTwoShot,         kRing,    kReduceScatter,  kAllGather,
                          kBroadcast, kTwoHopBroadcast, kLocated, kLocatedScatter, kLocatedGather,
                          kNvls};

// By kernels of a number of ranks, where there are any.
constexpr std::array kFixed{kOneShot, kTwoShot, kLocated, kReduceScatter, kLocatedScatter, kLL};
constexpr std::array kLLs{kLL};
constexpr std::array kLocateds{kLocated, kLocatedScatter, kLocatedGather};
constexpr std::array kLeavers{kLocated, kLocatedScatter, kLocatedGather, kNvls};
#ifdef WITH_MUTANTS
constexpr std::array kInSwitch{kNvls};
constexpr std::array kOneShots{kOneShot};
constexpr std::array kTwoShots{kTwoShot};
constexpr std::array kRings{kRing};
constexpr std::array kPushes{kOneShot, kTwoShot};
constexpr std::array kScatters{kReduceScatter};
constexpr std::array kGathers{kAllGather, kBroadcast};
constexpr std::array kTwoHopBroadcasts{kTwoHopBroadcast};
#endif

template <size_t n>
constexpr Compiled compiledFor(const std::array<How, n>& kinds) {
  Compiled compiled{false, false, false, false, false, false, false};
  for (const How& how : kinds) {
    const bool reduces = how.kind == Kind::kAllReduce || how.kind == Kind::kReduceScatter;
    compiled.moves |= !reduces;
    compiled.fixed |= how.ll;
    compiled.located |= how.located;
    compiled.nvls |= how.nvls;
    if (how.nvls) continue;
    compiled.one_shot |= reduces && how.algorithm == DeviceAlgorithm::kOneShot;
    compiled.two_shot |= reduces && how.algorithm == DeviceAlgorithm::kTwoShot;
    compiled.ring |= reduces && how.algorithm == DeviceAlgorithm::kRing;
  }
  return compiled;
}

// Calls of these kinds in a random order, on the same memory; a quarter of them of halves, if asked
// for.
template <class Rules, const auto& kinds, class B = host::Block, bool halves = false>
void mixed(const Shape& shape, int count, uint64_t start = kWraps, uint64_t depth = 2) {
  std::minstd_rand random(static_cast<unsigned>(shape.ranks * 64 + shape.blocks * 8 + shape.lanes));
  Ranks ranks(layoutOf(shape, depth), start);
  Calls calls(ranks, kLong);
  for (int i = 0; i < count; ++i) {
    const How how = kinds[random() % kinds.size()];
    const bool half = halves && random() % 4 == 0;
    const bool whole = how.kind == Kind::kAllReduce || how.kind == Kind::kBroadcast;
    const size_t parts = whole ? 1 : static_cast<size_t>(shape.ranks);
    Call call{.kind = how.kind,
              .algorithm = how.algorithm,
              .numbers = &numbersOf(shape.ranks, half ? DType::kFloat16 : DType::kFloat32),
              .count = random() % 4 == 0 ? random() % 256 : random() % (oracle::kMost / parts),
              .blocks = 1 + static_cast<int>(random() % static_cast<unsigned>(shape.blocks)),
              .window = 1 + random() % (depth - 1),
              .in_place = random() % 2 == 0,
              .place = static_cast<Alignment>(random() % 4),
              .root = static_cast<int>(random() % static_cast<unsigned>(shape.ranks)),
              .two_hops = how.two_hops,
              .fixed = how.ll,
              .located = how.located,
              .ll = how.ll,
              .nvls = how.nvls,
              .staged = static_cast<uint32_t>(random())};
    call.fixed |= compiledFor(kinds).fixed && !how.nvls && call.canBeFixed() && random() % 4 != 0;
    calls.add(call);
  }
  host::run<B>(shape, calls.count(), [&](B& block, int r, int c, size_t kernel) {
    constexpr Compiled kCompiled = compiledFor(kinds);
    if constexpr (halves)
      calls.at<Rules, kCompiled, DType::kFloat32, DType::kFloat16>(block, r, c, kernel);
    else
      calls.at<Rules, kCompiled, DType::kFloat32>(block, r, c, kernel);
  });
  calls.verify();
}

// The same without the barriers of a site.
template <const auto& kinds>
void without(Site site, const Shape& shape) {
  Barrierless::site = site;
  mixed<Delayed, kinds, Barrierless>(shape, 40);
}

// Rings with other primitives, which allReduceBlock does not know.
template <template <class, class, class> class Primitives>
void rings() {
  constexpr Shape kShape{3, 1, 4};
  Ranks ranks(layoutOf(kShape, 2));
  Calls calls(ranks, kLong);
  for (int i = 0; i < 20; ++i)
    calls.add({.algorithm = DeviceAlgorithm::kRing,
               .numbers = &numbersOf(kShape.ranks),
               .count = oracle::kMost});
  host::run(kShape, calls.count(), [&](host::Block& block, int r, int c, size_t kernel) {
    using E = Element<DType::kFloat32>;
    const RankCall& call = calls.rankCall(kernel, r);
    Guard<host::Block> guard(block, *call.comm, call, c);
    ring<E, Delayed, host::Block, Primitives>(block, guard, call, c, 1);
    guard.leave(1, call.output, call.count * sizeof(float));
  });
  calls.verify();
}

// Two calls of which some blocks of `absent` never come; the others' must end, the second one
// without any wait.
class Absence {
 public:
  static constexpr int kAbsent = 1;

  Absence(const How& how, uint64_t timeout, int blocks_that_come)
      : kShape{how.ll ? 4 : 3, 2, 2},
        leaves_(how.located || how.nvls),
        ranks_(layoutOf(kShape, 2), kWraps),
        calls_(ranks_, timeout),
        come_(blocks_that_come) {
    const bool moves = how.kind == Kind::kAllGather || how.kind == Kind::kBroadcast;
    for (int i = 0; i < 2; ++i)
      calls_.add({.kind = how.kind,
                  .algorithm = how.algorithm,
                  .numbers = &numbersOf(kShape.ranks, i && moves ? DType::kInt32 : DType::kFloat32),
                  .count = oracle::kMost /
                           (how.kind == Kind::kAllReduce || how.two_hops ? 1 : kShape.ranks),
                  .blocks = kShape.blocks,
                  .in_place = i == 0,
                  .place = Alignment::kApart,
                  .two_hops = how.two_hops,
                  .fixed = how.ll,
                  .located = how.located,
                  .ll = how.ll,
                  .nvls = how.nvls});
  }

  template <class B = host::Block, const auto& kinds = kAll>
  void run() {
    for (int r = 0; r < kShape.ranks; ++r) calls_.rankCall(1, r).timeout = 3 * kLong;
    const Nanos begin = now();
    host::run<B>(kShape, calls_.count(), [&](B& block, int r, int c, size_t kernel) {
      if (r != kAbsent || (c < come_ && kernel == 0))
        calls_.at<Delayed, compiledFor(kinds), DType::kFloat32>(block, r, c, kernel);
    });
    CHECK(now() - begin < static_cast<Nanos>(2 * kLong));
  }
  void abort() {
    for (int r = 0; r < kShape.ranks; ++r) ranks_.abortFlag(r).set();
  }
  void expectPoisoned(Cause cause) {
    bool some = false;
    for (int r = 0; r < kShape.ranks; ++r) {
      if (r == kAbsent) continue;
      // The first to give up may have told the others.
      const bool told =
          leaves_ && ranks_.trouble(r).cause == static_cast<uint64_t>(Cause::kAborted);
      some |= ranks_.trouble(r).cause == static_cast<uint64_t>(cause);
      CHECK(told || ranks_.trouble(r).cause == static_cast<uint64_t>(cause));
      CHECK_EQ(ranks_.trouble(r).operation, 1u);
      CHECK_EQ(ranks_.comm(r).local->found_inf, 1.f);
      for (size_t kernel = 0; kernel < calls_.count(); ++kernel) {
        // A broadcast's root has all that it needs.
        const Call& call = calls_.call(kernel);
        const Bytes output = calls_.tensors(kernel, r).result();
        const bool gives = call.kind == Kind::kBroadcast && call.root == r;
        const unsigned char poison = call.numbers->dtype == DType::kInt32 ? 0 : 0xff;
        CHECK(output == (gives ? call.wanted(r) : Bytes(output.size(), poison)));
        CHECK(calls_.tensors(kernel, r).intactAround());
      }
    }
    CHECK(some);
  }
  Trouble& trouble(int r) { return ranks_.trouble(r); }

  const Shape kShape;

 private:
  const bool leaves_;
  Ranks ranks_;
  Calls calls_;
  const int come_;
};

// A rank's second block never comes: the first block's work is done when the second gives up, and
// all of the output is poisoned.
template <class B = host::Block, const auto& kinds = kAll>
void halfAbsent(const How& how) {
  Absence absence(how, kGiveUp, 1);
  absence.run<B, kinds>();
  absence.expectPoisoned(Cause::kTimeout);
  for (int r : {0, 2}) CHECK_EQ(absence.trouble(r).channel, 1);
}

template <const auto& kinds = kAll>
void wholeAbsent(const How& how) {
  Absence absence(how, kGiveUp, 0);
  absence.run<host::Block, kinds>();
  absence.expectPoisoned(Cause::kTimeout);
  if (how.located || how.nvls) return;  // one of them may wait for rank 1, and tell the other
  const Trouble &zero = absence.trouble(0), &two = absence.trouble(2);
  for (const Trouble* t : {&zero, &two}) CHECK(t->channel >= 0 && t->channel < 2);
  CHECK_EQ(two.peer, 1);
  CHECK_EQ(two.step, kWraps);
  if (how.ll) CHECK_EQ(absence.trouble(3).peer, 1);
  if (how.ll || how.algorithm == DeviceAlgorithm::kOneShot ||
      how.algorithm == DeviceAlgorithm::kTwoShot) {
    CHECK_EQ(zero.peer, 1);
    CHECK_EQ(zero.step, kWraps);
  } else {
    // It waits for the second message of rank 2, who has got nothing to pass on, and for room for a
    // third one at rank 1.
    CHECK((zero.peer == 2 && zero.step == kWraps + 1) ||
          (zero.peer == 1 && zero.step == kWraps + 2));
  }
}

template <const auto& kinds = kAll>
void aborted(const How& how) {
  Absence absence(how, kLong, 0);
  std::thread host([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    absence.abort();
  });
  try {
    absence.run<host::Block, kinds>();
  } catch (...) {
    host.join();
    throw;
  }
  host.join();
  absence.expectPoisoned(Cause::kAborted);
}

// Of every kind, at the same time: they only wait.
void everyWay(void (*test)(const How&)) {
  ::ranks::inThreads(static_cast<int>(kAll.size()),
                     [&](int i) { test(kAll[static_cast<size_t>(i)]); });
}

// Whose reader takes its time between the flag and the tensors of its peer.
thread_local std::chrono::milliseconds slow{0};
struct SlowReader : DeviceRules {
  template <class Rules>
  static uint64_t hear(const uint64_t& word) {
    std::this_thread::sleep_for(std::exchange(slow, std::chrono::milliseconds(0)));
    return word;
  }
};

// It seldom lets others run between two looks, so that it looks at the clock in time on a machine
// with other work.
class Attentive : public host::Block {
 public:
  using host::Block::Block;
  static void pause() {
    thread_local unsigned looks = 0;
    if (++looks % 128 == 0) host::Block::pause();
  }
};
// With a clock that runs so fast that nobody waits after it has given up.
constexpr uint64_t kFast = 1000;
class Impatient : public Attentive {
 public:
  using Attentive::Attentive;
  static uint64_t nanoseconds() { return host::Block::nanoseconds() * kFast; }
};

// Rank 0 gives up on rank 1, which comes late, or is slow: it has found rank 0's tensors by then.
template <class B = Attentive>
void leftAlone(const How& how, std::chrono::milliseconds late, std::chrono::milliseconds slowly,
               uint64_t clock = 1) {
  constexpr Shape kShape{2, 1, 1};
  Ranks ranks(layoutOf(kShape, 2));
  Calls calls(ranks, kLong * clock);
  calls.add({.kind = how.kind,
             .numbers = &numbersOf(kShape.ranks),
             .count = 2 * kChunkElements,
             .in_place = true,
             .located = how.located,
             .nvls = how.nvls});
  calls.rankCall(0, 0).timeout = 300'000'000 * clock;
  const Bytes addends = calls.tensors(0, 1).result();
  host::run<B>(kShape, 1, [&](B& block, int r, int c, size_t kernel) {
    if (r == 1) {
      std::this_thread::sleep_for(late);
      slow = slowly;
    }
    calls.at<SlowReader, compiledFor(kLeavers), DType::kFloat32>(block, r, c, kernel);
  });
  CHECK_EQ(ranks.trouble(0).cause, static_cast<uint64_t>(Cause::kTimeout));
  CHECK_EQ(ranks.trouble(1).cause, static_cast<uint64_t>(Cause::kAborted));
  for (int r = 0; r < kShape.ranks; ++r)
    CHECK(calls.tensors(0, r).result() == Bytes(addends.size(), 0xff));
}

const mutants::Mutants kMutants{
#ifdef WITH_MUTANTS
    {"left_without_a_wait",
     [] { leftAlone<Impatient>(kLocated, {}, std::chrono::milliseconds(600), kFast); }},
    {"left_a_gather_without_a_wait",
     [] { leftAlone<Impatient>(kLocatedGather, {}, std::chrono::milliseconds(600), kFast); }},
    {"ring_weak_publish", [] { mixed<WeakPublish, kRings>({3, 1, 2}, 40); }},
    {"ring_weak_observe", [] { mixed<WeakObserve, kRings>({3, 1, 2}, 40); }},
    {"push_weak_publish", [] { mixed<WeakPublish, kPushes>({3, 1, 2}, 40); }},
    {"push_weak_observe", [] { mixed<WeakObserve, kPushes>({3, 1, 2}, 40); }},
    {"early_reuse", [] { mixed<EarlyReuse, kRings>({3, 1, 2}, 40); }},
    {"early_release", rings<EarlyRelease>},
    {"skipped_slice", rings<SkippedSlice>},
    {"gather_weak_publish", [] { mixed<WeakPublish, kGathers>({3, 1, 2}, 40); }},
    {"gather_weak_observe", [] { mixed<WeakObserve, kGathers>({3, 1, 2}, 40); }},
    {"scatter_with_three_sets", [] { mixed<Sets<3>, kScatters>({3, 1, 1}, 60, 0); }},
    {"gather_with_three_sets", [] { mixed<Sets<3>, kGathers>({3, 1, 1}, 60, 0); }},
    {"two_hop_broadcast_with_two_sets",
     [] { mixed<Sets<2>, kTwoHopBroadcasts>({3, 1, 1}, 60, 0); }},
    {"no_barrier_in_gathers_post", [] { without<kGathers>(Site::kPost, {2, 1, 2}); }},
    {"oneshot_with_one_set", [] { mixed<Sets<1>, kOneShots>({2, 1, 2}, 40); }},
    {"twoshot_with_two_sets", [] { mixed<Sets<2>, kTwoShots>({3, 1, 1}, 40, 0); }},
    {"no_barrier_in_finish", [] { without<kRings>(Site::kFinish, {2, 1, 2}); }},
    {"no_barrier_in_post", [] { without<kPushes>(Site::kPost, {2, 1, 2}); }},
    {"no_barrier_in_until", [] { without<kAll>(Site::kUntil, {2, 1, 2}); }},
    {"nvls_weak_publish", [] { mixed<WeakPublish, kInSwitch>({3, 1, 2}, 40); }},
    {"nvls_weak_observe", [] { mixed<WeakObserve, kInSwitch>({3, 1, 2}, 40); }},
    {"no_barrier_in_nvls_post", [] { without<kInSwitch>(Site::kPost, {2, 1, 2}); }},
    {"ll_words_that_are_torn", [] { mixed<TornWords, kLLs>({2, 1, 2}, 60); }},
    {"no_barrier_in_leave",
     [] {
       Barrierless::site = Site::kLeave;
       for (int i = 0; i < 20; ++i) halfAbsent<Barrierless, kOneShots>(kOneShot);
     }},
#endif
};

}  // namespace

TEST(calls_of_all_kinds_hold_under_random_delays) {
  for (const Shape& shape : {Shape{2, 1, 4}, Shape{2, 2, 1}, Shape{3, 2, 2}, Shape{4, 1, 3}})
    mixed<Delayed, kAll, host::Block, true>(shape, 60);
  mixed<Delayed, kAll, host::Block, true>({3, 1, 1}, 60, 0, 4);
  mixed<Delayed, kAll, host::Block, true>({5, 2, 1}, 20, 0, 8);
  mixed<Delayed, kAll, host::Block, true>({8, 1, 2}, 14);
}

TEST(kernels_of_a_number_of_ranks_hold_under_random_delays) {
  for (const Shape& shape : {Shape{2, 1, 4}, Shape{2, 3, 1}, Shape{4, 2, 2}})
    mixed<Delayed, kFixed, host::Block, true>(shape, 60);
  mixed<Delayed, kFixed, host::Block, true>({8, 1, 2}, 14);
}

TEST(who_has_left_is_left_alone) {
  for (const How& how : kLocateds) {
    leftAlone(how, {}, std::chrono::milliseconds(1000));
    leftAlone(how, std::chrono::milliseconds(1000), {});
    leftAlone(how, std::chrono::milliseconds(3000), {});  // after the farewell
  }
  leftAlone(kNvls, std::chrono::milliseconds(1000), {});
}

// Rank 0 gives up in a call by slots, and comes to a call in which ranks leave.  Rank 1 is late to
// the first: it must not take old slots for rank 0's sums.
TEST(who_has_failed_leaves_no_later_call) {
  constexpr Shape kShape{2, 1, 1};
  for (const How& how : kLeavers) {
    Ranks ranks(layoutOf(kShape, 2));
    Calls calls(ranks, kGiveUp / 4);
    for (const How& one : {kTwoShot, how})
      calls.add({.kind = one.kind,
                 .algorithm = one.algorithm,
                 .numbers = &numbersOf(kShape.ranks),
                 .count = 2 * kChunkElements,
                 .in_place = true,
                 .located = one.located,
                 .nvls = one.nvls});
    std::atomic<bool> rank_0_has_ended = false;
    host::run<Attentive>(kShape, calls.count(), [&](Attentive& block, int r, int c, size_t kernel) {
      if (r == 1 && kernel == 0)
        ranks::await("rank 0 has given up", [&] { return rank_0_has_ended.load(); });
      calls.at<Delayed, compiledFor(kAll), DType::kFloat32>(block, r, c, kernel);
      if (r == 0 && kernel == 1) rank_0_has_ended = true;
    });
    for (size_t kernel = 0; kernel < calls.count(); ++kernel)
      for (int r = 0; r < kShape.ranks; ++r) {
        const Bytes output = calls.tensors(kernel, r).result();
        CHECK(output == Bytes(output.size(), 0xff));
      }
  }
}

// A peer that is in another call, or whose tensor reaches beyond its segment.
TEST(nothing_is_touched_where_calls_or_segments_do_not_fit) {
  constexpr Shape kShape{2, 1, 2};
  for (const auto& [kind, other_call] :
       {std::pair{Kind::kAllReduce, true}, std::pair{Kind::kAllReduce, false},
        std::pair{Kind::kReduceScatter, true}, std::pair{Kind::kReduceScatter, false},
        std::pair{Kind::kAllGather, true}, std::pair{Kind::kAllGather, false}}) {
    Ranks ranks(layoutOf(kShape, 2));
    Calls calls(ranks, kLong);
    calls.add({.kind = kind,
               .numbers = &numbersOf(kShape.ranks),
               .count = 2 * kChunkElements,
               .in_place = false,
               .located = true});
    Location& theirs = calls.location(0, 1);
    if (other_call)
      ++theirs.what;
    else
      --ranks.entry(0, 1, std::max(theirs.in.segment, theirs.out.segment)).bytes;
    host::run(kShape, 1, [&](host::Block& block, int r, int c, size_t kernel) {
      calls.at<Delayed, compiledFor(kLocateds), DType::kFloat32>(block, r, c, kernel);
    });
    // Both find another call; the first to do so may have left before the other looks.
    const auto found = [&](int r) {
      return ranks.trouble(r).cause == static_cast<uint64_t>(Cause::kMismatch);
    };
    CHECK(found(0) || (other_call && found(1)));
    for (int r = 0; r < kShape.ranks; ++r) {
      const Bytes output = calls.tensors(0, r).result();
      CHECK(output == Bytes(output.size(), 0xff));
      CHECK(calls.tensors(0, r).intactAround());
    }
  }
}

#ifdef WITH_MUTANTS
// The numbers of sets that push.h asks for: one less is a mutant.
TEST(one_shot_needs_two_sets_and_two_shot_three) {
  mixed<Sets<2>, kOneShots>({2, 1, 2}, 40, 0);
  mixed<Sets<2>, kOneShots>({3, 1, 1}, 40, 0);
  mixed<Sets<3>, kTwoShots>({3, 1, 1}, 40, 0);
  mixed<Sets<3>, kPushes>({4, 1, 2}, 40, 0);
}

// Why the mutants without barriers have several lanes.
TEST(a_single_lane_needs_no_barrier) {
  without<kRings>(Site::kFinish, {2, 1, 1});
  without<kPushes>(Site::kPost, {2, 1, 1});
  without<kAll>(Site::kUntil, {2, 1, 1});
}
#endif

TEST(who_waits_for_a_rank_that_never_comes_gives_up) {
  everyWay(wholeAbsent<>);
  wholeAbsent<kLLs>(kLL);
}

TEST(who_waits_for_a_block_that_never_comes_gives_up) {
  everyWay(halfAbsent<>);
  halfAbsent<host::Block, kLLs>(kLL);
}

TEST(the_hosts_word_ends_waits) {
  everyWay(aborted<>);
  aborted<kLLs>(kLL);
}

// A number of LL's calls comes again after 2^32 of them.  The words that a long message of the old
// number has left must not be taken for those of the new one.
TEST(words_of_an_old_number_are_refreshed) {
  constexpr Shape kShape{2, 1, 2};
  Ranks ranks(layoutOf(kShape, 2));
  const auto calls = [&](uint64_t first, const std::vector<size_t>& counts) {
    for (int r = 0; r < kShape.ranks; ++r) ranks.comm(r).local->counters[0].ll = first;
    Calls all(ranks, kLong);
    for (const size_t count : counts)
      all.add({.algorithm = DeviceAlgorithm::kOneShot,
               .numbers = &numbersOf(kShape.ranks),
               .count = count,
               .fixed = true,
               .ll = true});
    host::run(kShape, all.count(), [&](host::Block& block, int r, int c, size_t kernel) {
      all.at<Delayed, compiledFor(kLLs), DType::kFloat32>(block, r, c, kernel);
    });
    all.verify();
  };
  constexpr uint64_t kOld = kLLRefresh - 2, kLater = (uint64_t{1} << 32) - kLLRefresh;
  calls(kOld, {oracle::kMost, oracle::kMost, 1, 1});
  for (int r = 0; r < kShape.ranks; ++r) {
    const DeviceComm& comm = ranks.comm(r);
    for (uint64_t set = 0; set < kLLSets; ++set)
      for (int p = 0; p < kShape.ranks; ++p) {
        if (p == r) continue;
        const auto* words =
            reinterpret_cast<const uint64_t*>(comm.base[r] + comm.layout.llSlot(0, set, p));
        for (size_t i = 0; i < comm.layout.ll_bytes / sizeof *words; ++i)
          CHECK(words[i] >> 32 > kLLRefresh);
      }
  }
  calls(kOld + kLLRefresh + kLater, {oracle::kMost, oracle::kMost, 7, oracle::kMost});
  calls((uint64_t{1} << 33) - 2, {oracle::kMost, oracle::kMost, oracle::kMost, 9});  // flag 0, too
}

int main(int argc, char** argv) {
  return mutants::main(argc, argv, kMutants);
}
