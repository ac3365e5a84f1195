// The protocols of shared memory: exchange, links and ring, channels of messages, and pipes of
// bytes with their doorbells, with random delays at every step of them, with ranks that die at any
// step, and with mutants that must be caught.
#define CHECK_OWN_MAIN
#include <poll.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "algorithm/ring.h"
#include "base/clock.h"
#include "base/error.h"
#include "check.h"
#include "collectives/reduction.h"
#include "mutants.h"
#include "ranks.h"
#include "tcp_world.h"
#include "transport/shm/byte_pipe.h"
#include "transport/shm/channel.h"
#include "transport/shm/exchange.h"
#include "transport/shm/shm_link.h"

using namespace ringreduce;

namespace {

struct Delayed : HostRules {
  static void delay() { mutants::randomDelay(); }
};

struct WeakPublish : Delayed {
  static constexpr auto kPublish = std::memory_order_relaxed;
};
struct WeakObserve : Delayed {
  static constexpr auto kObserve = std::memory_order_relaxed;
};
struct NoWake : Delayed {
  static constexpr bool kWakes = false;
};
struct EarlyReuse : Delayed {
  static constexpr uint64_t kEarlyReuse = 1;
};

// Sleeps right away, and long: whoever is not woken costs so much time that the test notices.
constexpr Patience kSleepy{.spin = 0, .yield = 0, .sleep = 2 * kSecond};

// Ends a wait after twenty seconds, and one that would sleep after a minute, so that a mutant which
// stalls, or whose waits all last as long as a sleep, is a failure and not a hang.  Not by now():
// to that clock a process whose threads all sleep looks stopped.
struct Impatient : WaitGuard {
  const Nanos start = monotonicNow();
  bool failed() const override { return monotonicNow() - start > 60 * kSecond; }
  void poll(int, Ready) override {
    if (monotonicNow() - start > 20 * kSecond) throw std::runtime_error("the protocol has stalled");
  }
  void idle(Ready) override {}
  void verify(int) override {}
  void verify(int, const Announcement&) override {}
  PeerState stateOf(int) const override { return {}; }
  bool isAbsent(int) const override { return false; }
  [[noreturn]] void endOperation(int) override { throw std::runtime_error("no rank is absent"); }
  [[noreturn]] void broken(int, const std::string&) override {
    throw std::runtime_error("there is nothing that could break");
  }
  [[noreturn]] void disagree(int, int, uint64_t, uint64_t) override {
    throw std::runtime_error("ranks disagree");
  }
};

// The pages and slots of P ranks, in ordinary memory.
struct Memory {
  Memory(int P, size_t bytes, int depth)
      : pages(static_cast<size_t>(P)),
        data(2 * static_cast<size_t>(P),
             std::vector<std::byte>(bytes * static_cast<size_t>(depth))),
        bytes(bytes),
        depth(depth) {
    for (RankPage& page : pages) std::memset(static_cast<void*>(&page), 0, sizeof page);
  }
  Slots slots(int r) { return {data[static_cast<size_t>(2 * r)].data(), bytes, depth}; }
  Slots links(int r) { return {data[static_cast<size_t>(2 * r + 1)].data(), bytes, depth}; }

  std::vector<RankPage> pages;
  std::vector<std::vector<std::byte>> data;
  size_t bytes;
  int depth;
};

constexpr size_t kWords = 32;

void fill(std::byte* slot, uint64_t value) {
  for (size_t i = 0; i < kWords; ++i) std::memcpy(slot + 8 * i, &value, 8);
}
void expect(const std::byte* slot, uint64_t value) {
  for (size_t i = 0; i < kWords; ++i) {
    uint64_t found;
    std::memcpy(&found, slot + 8 * i, 8);
    CHECK_EQ(found, value);
  }
}
uint64_t token(int rank, uint64_t step) {
  return step * 64 + static_cast<uint64_t>(rank);
}

// Random operations on one exchange: everybody speaks, one speaks, or a sum is shared out.
template <class Rules>
void exchanges(int P, int depth) {
  Memory memory(P, kWords * 8, depth);
  ranks::inThreads(P, [&](int me) {
    Impatient watch;
    Waiter waiter(memory.pages[static_cast<size_t>(me)], watch);
    waiter.setPatience(kSleepy);
    std::vector<typename BasicExchange<Rules>::Member> members;
    for (int r = 0; r < P; ++r)
      members.push_back({&memory.pages[static_cast<size_t>(r)], memory.slots(r)});
    BasicExchange<Rules> exchange(me, members, waiter, watch);
    std::minstd_rand plan(7);  // the same on all ranks
    for (int operation = 0; operation < 300; ++operation) {
      const uint64_t steps = 1 + plan() % 4;
      const int kind = static_cast<int>(plan() % 3), root = static_cast<int>(plan() % P);
      const uint64_t first = exchange.begin(steps);
      const auto speak = [&](uint64_t s) {
        if (kind != 1 || me == root) fill(exchange.acquire(s), token(me, s));
        exchange.post(s);
      };
      const auto collect = [&](uint64_t s) {
        for (int r = 0; r < P; ++r)
          if (r != me) expect(exchange.shared(r, s), token(r, s) + 1);
        exchange.release(s);
      };
      speak(first);
      for (uint64_t s = first; s < first + steps; ++s) {
        if (s + 1 < first + steps) speak(s + 1);
        for (int r = 0; r < P; ++r)
          if (r != me && (kind == 0 || (kind == 1 && r == root)))
            expect(exchange.peek(r, s), token(r, s));
          else if (r != me && kind == 2)
            exchange.peek(r, s);
        if (kind == 2) {
          fill(exchange.own(s), token(me, s) + 1);
          exchange.share(s);
          if (s > first) collect(s - 1);
        } else {
          exchange.share(s);  // every counter passes every step
          exchange.release(s);
        }
      }
      if (kind == 2) collect(first + steps - 1);
    }
  });
}

// A receiver that gives its slot back before it has read it.
struct EarlyRelease final : RecvLink {
  explicit EarlyRelease(RecvLink& link) : link(link) {}
  const std::byte* peek() override {
    const std::byte* slot = link.peek();
    link.release();
    return slot;
  }
  void release() override {}
  RecvLink& link;
};

// Primitives that forget to add one slice.
struct SkippedSlice : HostPrimitives {
  using HostPrimitives::HostPrimitives;
  void recvReduceCopySend(int chunk, size_t j) {
    if (j == 1)
      recvCopySend(chunk, j);
    else
      HostPrimitives::recvReduceCopySend(chunk, j);
  }
};

// The ring, over links with these rules, against sums of small whole numbers.
template <class Rules, class Primitives = HostPrimitives, bool kEarlyRelease = false>
void rings(int P, int depth, size_t window) {
  constexpr size_t kSlice = 128;
  for (size_t n : {size_t{0}, size_t{5}, 3 * kSlice, 40 * kSlice + 17}) {
    Memory fresh(P, kSlice * sizeof(float), depth);
    ranks::inThreads(P, [&](int me) {
      Impatient watch;
      RankPage& page = fresh.pages[static_cast<size_t>(me)];
      Waiter waiter(page, watch);
      waiter.setPatience(kSleepy);
      Exchange unused(me, {{&page, fresh.slots(me)}}, waiter, watch);
      const auto pipe = [&](int from, int to) {
        return ShmPipe{from, to, &fresh.pages[static_cast<size_t>(from)],
                       &fresh.pages[static_cast<size_t>(to)], fresh.links(to)};
      };
      BasicShmSendLink<Rules> next(pipe(me, (me + 1) % P), waiter);
      BasicShmRecvLink<Rules> prev(pipe((me + P - 1) % P, me), waiter);
      EarlyRelease early(prev);
      OverMemory over{.rank = me,
                      .size = P,
                      .exchange = unused,
                      .next = next,
                      .prev = kEarlyRelease ? static_cast<RecvLink&>(early) : prev,
                      .link_slots = fresh.links(me),
                      .watch = watch,
                      .algorithm = Algorithm::kRing};
      for (int again = 0; again < 20; ++again) {
        std::vector<float> data(n), expected(n);
        for (size_t i = 0; i < n; ++i) {
          data[i] = static_cast<float>((i + static_cast<size_t>(me * 7 + again)) % 100);
          for (int r = 0; r < P; ++r)
            expected[i] += static_cast<float>((i + static_cast<size_t>(r * 7 + again)) % 100);
        }
        const AllReduce call{data.data(), n, DType::kFloat32, ReduceOp::kSum};
        const Cut cut{n, P};
        Primitives primitives(over, call, reduceKernels(call.dtype, call.op), kSlice);
        runRing(primitives, {.rank = me,
                             .world_size = P,
                             .slices = std::max<size_t>(1, ceilDiv(cut.chunkSize(), kSlice)),
                             .window = window});
        CHECK(data == expected);
      }
    });
  }
}

// ---- losses

#ifdef __SANITIZE_THREAD__
constexpr bool kThreadSanitizer = true;
#else
constexpr bool kThreadSanitizer = false;
#endif

struct Died {};

// A rank that dies when it is about to make so many more publications; or the others take it for
// dead, and it goes on.
struct Mortal : HostRules {
  static inline thread_local int publications_left = 0;
  static inline thread_local bool one_more = false;  // after its death
  static inline thread_local bool wakes = false;
  static inline thread_local std::function<void()> last_words;
  template <class Rules>
  static void store(uint64_t& flag, uint64_t n) {
    if (publications_left-- > 0) return HostRules::store<Rules>(flag, n);
    last_words();
    if (!std::exchange(one_more, false) && !wakes) throw Died{};
    for (int i = 0; i < 20; ++i) mutants::randomDelay();
    HostRules::store<Rules>(flag, n);
  }
};

enum class LossMistake {
  kNone,
  kTooEarly,  // a rank is taken for dead that publishes once more
  kUnfenced,  // a rank that was frozen and goes on is not left out, but taken for dead
};

struct Survivor final : Impatient {
  Survivor(int me, std::vector<std::atomic<bool>>& dead, std::vector<RankPage>& pages, bool fences)
      : me(me), dead(dead), pages(pages), fences(fences) {}
  void poll(int rank, Ready ready) override {
    if (isLeftOut(pages[static_cast<size_t>(me)])) throw Died{};
    Impatient::poll(rank, ready);
  }
  bool isAbsent(int rank) const override {
    mutants::randomDelay();
    const bool is_dead = dead[static_cast<size_t>(rank)];
    if (is_dead && fences) leaveOut(pages[static_cast<size_t>(rank)]);
    return is_dead;
  }
  const int me;
  std::vector<std::atomic<bool>>& dead;
  std::vector<RankPage>& pages;
  const bool fences;
};

// A sum and an average over P ranks, of which some die.  An element tells whose addends it has.
// The mortal ranks go through the steps of the exchange as Reduction does, in the simplest way.
struct LossyWorld {
  static constexpr int kSums = 2, kSlices = 3, kDepth = 4;
  static constexpr size_t kSlice = 4 * kChunkElements, kCount = kSlices * kSlice - 100;

  // `wakes`: the ranks that are taken for dead go on.
  LossyWorld(int P, bool shared_out, bool wakes, LossMistake mistake)
      : P(P),
        shared_out(shared_out),
        wakes(wakes),
        mistake(mistake),
        memory(P, kSlice * 4, kDepth),
        dead(static_cast<size_t>(P)) {}

  static float addend(int rank) { return static_cast<float>(1 << 6 * rank); }
  Span slice(uint64_t j) const { return piece(kCount, kSlice, j); }
  Span part(uint64_t j, int p) const {
    const Span s = slice(j);
    const auto ranks = static_cast<size_t>(P);
    Span span = piece(s.size, roundUp((s.size + ranks - 1) / ranks, kChunkElements),
                      static_cast<size_t>(p));
    span.begin += s.begin;
    return span;
  }
  template <class Rules>
  BasicExchange<Rules> exchange(int me, Waiter& waiter, WaitGuard& guard) {
    std::vector<typename BasicExchange<Rules>::Member> members;
    for (int r = 0; r < P; ++r)
      members.push_back({&memory.pages[static_cast<size_t>(r)], memory.slots(r)});
    return BasicExchange<Rules>(me, members, waiter, guard);
  }

  Survivor survivor(int me) {
    return {me, dead, memory.pages, wakes && mistake != LossMistake::kUnfenced};
  }

  void dieAfter(int me, int publications) {
    Survivor guard = survivor(me);
    Waiter waiter(memory.pages[static_cast<size_t>(me)], guard);
    auto mine = exchange<Mortal>(me, waiter, guard);
    Mortal::publications_left = publications;
    Mortal::last_words = [&] { dead[static_cast<size_t>(me)] = true; };
    Mortal::one_more = mistake == LossMistake::kTooEarly;
    Mortal::wakes = wakes;
    bool torn = false;
    const auto put = [](std::byte* at, float value, size_t n) {
      for (size_t i = 0; i < n; ++i) std::memcpy(at + 4 * i, &value, 4);
    };
    try {
      for (int sum = 0; sum < kSums; ++sum) {
        const uint64_t first = mine.begin(kSlices);
        for (uint64_t j = 0; j < kSlices; ++j) {
          std::byte* const slot = mine.acquire(first + j);
          put(slot, -1e9F, kSlice);  // nobody may read the slot of a rank that dies here
          if (!wakes && Mortal::publications_left == 0) mine.post(first + j);
          put(slot, addend(me), slice(j).size);
          mine.post(first + j);
          float total = addend(me), ranks = 1;
          for (int r = 0; r < P; ++r)
            if (const std::byte* theirs = r == me ? nullptr : mine.find(r, first + j)) {
              total += addend(r), ++ranks;
              if (kThreadSanitizer || shared_out) continue;  // others may write it meanwhile
              float found;
              std::memcpy(&found, theirs, 4);
              torn = torn || found != addend(r);
            }
          if (shared_out) {
            const Span s = part(j, me);
            put(mine.own(first + j) + (s.begin - slice(j).begin) * 4,
                sum == 0 ? total : total / ranks, s.size);
            mine.share(first + j);
            for (int r = 0; r < P; ++r)
              if (r != me) mine.shared(r, first + j);
          }
          mine.release(first + j);
        }
        CHECK(isLeftOut(memory.pages[static_cast<size_t>(me)]) || !torn);
      }
    } catch (const Died&) {
    }
    dead[static_cast<size_t>(me)] = true;
  }

  void survive(int me) {
    Survivor guard = survivor(me);
    Waiter waiter(memory.pages[static_cast<size_t>(me)], guard);
    waiter.setPatience({.spin = 0, .yield = 20 * kMicrosecond, .sleep = kMillisecond});
    Exchange mine = exchange<HostRules>(me, waiter, guard);
    const ShmPipe unused{me, me, &memory.pages[static_cast<size_t>(me)],
                         &memory.pages[static_cast<size_t>(me)], memory.links(me)};
    ShmSendLink next(unused, waiter);
    ShmRecvLink prev(unused, waiter);
    OverMemory c{.rank = me,
                 .size = P,
                 .exchange = mine,
                 .next = next,
                 .prev = prev,
                 .link_slots = memory.links(me),
                 .watch = guard,
                 .algorithm = shared_out ? Algorithm::kTwoShot : Algorithm::kDirect};
    for (uint64_t sum = 0; sum < kSums; ++sum) {
      std::vector<float> data(kCount, addend(me));
      const ReduceOp op = sum == 0 ? ReduceOp::kSum : ReduceOp::kAvg;
      allReduce(c, AllReduce{data.data(), kCount, DType::kFloat32, op});
      results[static_cast<size_t>(me)].push_back(std::move(data));
    }
  }

  // By the final flags of the dead.
  float expected(uint64_t step, int owner) {
    float total = 0, ranks = 0;
    for (int r = 0; r < P; ++r) {
      RankPage& page = memory.pages[static_cast<size_t>(r)];
      const bool shares = shared_out && r == owner;
      const uint64_t last = shares ? page.last_reduced : page.last_posted;
      const uint64_t count = page.left_out ? last - 1 : (shares ? page.reduced : page.posted).value;
      if (!dead[static_cast<size_t>(r)] || count > step) total += addend(r), ++ranks;
    }
    return step < kSlices ? total : total / ranks;
  }
  void check() {
    for (int r = 0; r < P; ++r)
      for (size_t sum = 0; sum < results[static_cast<size_t>(r)].size(); ++sum)
        for (uint64_t j = 0; j < kSlices; ++j)
          for (int owner = 0; owner < P; ++owner) {
            const Span s = part(j, owner);
            const float wanted = expected(sum * kSlices + j, owner);
            for (size_t i = s.begin; i < s.end(); ++i)
              CHECK_EQ(results[static_cast<size_t>(r)][sum][i], wanted);
          }
  }

  const int P;
  const bool shared_out, wakes;
  const LossMistake mistake;
  Memory memory;
  std::vector<std::atomic<bool>> dead;
  std::vector<std::vector<float>> results[4];
};

template <LossMistake kMistake = LossMistake::kNone, bool kWakes = false>
void losses() {
  for (const bool shared_out : {false, true})
    for (const auto& [P, mortals] : {std::pair{2, 1}, {3, 1}, {4, 2}, {4, 3}})
      for (int publications = 0; publications < LossyWorld::kSums * LossyWorld::kSlices * 3;
           ++publications) {
        LossyWorld world(P, shared_out, kWakes, kMistake);
        ranks::inThreads(P, [&](int me) {
          // Rank 0 dies first: it owns the first part.
          if (me < mortals)
            world.dieAfter(me, publications + 2 * me);
          else
            world.survive(me);
        });
        world.check();
      }
}

// ---- all

template <class Rules>
void everything() {
  for (int P : {2, 3, 5})
    for (int depth : {3, 4, 8}) exchanges<Rules>(P, depth);
  for (int P : {2, 3, 4, 7})
    for (int depth : {2, 4, 8})
      for (size_t window = 1; window < static_cast<size_t>(depth); window += 2)
        rings<Rules>(P, depth, window);
}

// What the two ends of a channel do in the wrong order.
enum class ChannelMistake {
  kNone,
  kEarlyCommit,  // the sender publishes a part and then writes its payload
  kEarlyPop,     // the receiver gives a part's room back and then reads its payload
};

// Records of all sizes through one channel.  Some fill the ring to its very end, the largest are
// half as long as it.
template <class Rules, ChannelMistake kMistake = ChannelMistake::kNone>
void channels() {
  constexpr uint64_t kRecords = 4000;
  const auto sizeOf = [](uint64_t id) -> size_t {
    const uint64_t mixed = id * 0x9e3779b97f4a7c15u >> 40;
    if (id % 97 == 0) return kRingBytes / 2 - kPartAlign - mixed % 3;
    if (id % 7 == 0) return mixed % (20 << 10);
    return mixed % 4 == 0 ? kPartAlign * (mixed % 9) + kPartAlign - sizeof(MessagePart)
                          : mixed % 300;
  };
  const auto payloadOf = [&](uint64_t id) {
    return std::vector<uint8_t>(sizeOf(id), static_cast<uint8_t>(id * 31 + 7));
  };
  std::vector<uint64_t> ring(kRingBytes / sizeof(uint64_t));
  auto* const bytes = reinterpret_cast<std::byte*>(ring.data());
  Box box{};
  Impatient watch;
  const auto again = [&] {
    bool unused = false;
    auto never = [&] { return unused; };
    watch.poll(0, never);
    std::this_thread::yield();
  };
  const auto dawdle = [] {
    for (int i = 0; i < 20; ++i) Rules::delay();
  };
  ranks::inThreads(2, [&](int side) {
    if (side == 0) {
      BasicChannelWriter<Rules> out(bytes, box.filled, box.emptied);
      for (uint64_t id = 0; id < kRecords; ++id) {
        const std::vector<uint8_t> payload = payloadOf(id);
        std::byte* room;
        while (!(room = out.reserve(payload.size()))) again();
        const MessagePart part{.id = id,
                               .count = ~id,
                               .payload = static_cast<uint32_t>(payload.size()),
                               .tag = static_cast<int32_t>(id % 5),
                               .type = MessagePart::Type::kEager};
        if (kMistake == ChannelMistake::kEarlyCommit) {
          out.commit(part);
          dawdle();
        }
        if (!payload.empty()) std::memcpy(room, payload.data(), payload.size());
        if (kMistake != ChannelMistake::kEarlyCommit) out.commit(part);
      }
    } else {
      BasicChannelReader<Rules> in(bytes, box.filled, box.emptied);
      for (uint64_t id = 0; id < kRecords; ++id) {
        const MessagePart* part;
        while (!(part = in.front())) again();
        CHECK_EQ(part->id, id);
        CHECK_EQ(part->count, ~id);
        CHECK_EQ(part->tag, static_cast<int32_t>(id % 5));
        const std::vector<uint8_t> payload = payloadOf(id);
        CHECK_EQ(part->payload, payload.size());
        if (kMistake == ChannelMistake::kEarlyPop) {
          in.pop(payload.size());
          dawdle();
        }
        CHECK(payload.empty() || std::memcmp(part + 1, payload.data(), payload.size()) == 0);
        if (kMistake != ChannelMistake::kEarlyPop) in.pop(payload.size());
      }
      CHECK(!in.front());
    }
  });
}

// Two ranks send each other more bytes than a pipe holds, in pieces that differ.  One that can move
// nothing sleeps at once, and long: a doorbell that is not rung costs so much that the test
// notices.
template <class Rules>
void pipes(Impatient& watch) {
  constexpr size_t kBytes = 5 * kRingBytes + 12345;
  const auto byteAt = [](size_t at, int from) {
    return static_cast<uint8_t>(at * 31 + at / 251 + static_cast<size_t>(from));
  };
  const tcp_world::HostOfThreads host({0, 1});
  ranks::inThreads(2, [&](int me) {
    const auto neighbours = host.of<Rules>(me);
    BytePipe& pipe = *neighbours->pipe(1 - me);
    CHECK(!neighbours->pipe(me));
    std::vector<uint8_t> out(kBytes), in(kBytes);
    for (size_t at = 0; at < kBytes; ++at) out[at] = byteAt(at, me);
    std::minstd_rand random(static_cast<unsigned>(me + 1));
    size_t sent = 0, received = 0;
    // Two pieces of random sizes.
    const auto piecesOf = [&](std::vector<uint8_t>& data, size_t from) {
      const size_t first = std::min<size_t>(kBytes - from, 1 + random() % 100'000);
      const size_t second = std::min<size_t>(kBytes - from - first, random() % 100'000);
      return std::array<iovec, 2>{{{&data[from], first}, {data.data() + from + first, second}}};
    };
    const auto moves = [&] {
      size_t moved = 0;
      if (received < kBytes) moved += pipe.receive(piecesOf(in, received).data(), 2);
      received += moved;
      if (sent < kBytes) {
        const size_t n = pipe.send(piecesOf(out, sent).data(), 2);
        sent += n;
        moved += n;
      }
      return moved > 0;
    };
    while (sent < kBytes || received < kBytes) {
      if (moves()) continue;
      neighbours->listen(true);
      if (!moves()) {
        pollfd bell{.fd = neighbours->doorbell(), .events = POLLIN, .revents = 0};
        ::poll(&bell, 1, 2000);
        bool unused = false;
        auto never = [&] { return unused; };
        watch.poll(1 - me, never);
      }
      neighbours->listen(false);
      uint64_t rings = 0;
      [[maybe_unused]] const ssize_t n = ::read(neighbours->doorbell(), &rings, sizeof rings);
    }
    for (size_t at = 0; at < kBytes; ++at) CHECK_EQ(in[at], byteAt(at, 1 - me));
  });
}

template <class Rules>
void manyPipes() {
  Impatient watch;
  for (int i = 0; i < 10; ++i) pipes<Rules>(watch);
}

const mutants::Mutants kMutants{
    {"weak_publish", everything<WeakPublish>},
    {"weak_observe", everything<WeakObserve>},
    {"no_wake", [] { exchanges<NoWake>(5, 3); }},
    {"early_reuse", everything<EarlyReuse>},
    {"early_release", [] { rings<Delayed, HostPrimitives, true>(3, 2, 1); }},
    {"skipped_slice", [] { rings<Delayed, SkippedSlice>(3, 4, 2); }},
    {"taken_for_dead_too_early", losses<LossMistake::kTooEarly>},
    {"woken_up_and_not_left_out", losses<LossMistake::kUnfenced, true>},
    {"channel_weak_publish", channels<WeakPublish>},
    {"channel_weak_observe", channels<WeakObserve>},
    {"channel_early_reuse", channels<EarlyReuse>},
    {"channel_early_commit", channels<Delayed, ChannelMistake::kEarlyCommit>},
    {"channel_early_pop", channels<Delayed, ChannelMistake::kEarlyPop>},
    {"pipe_weak_publish", manyPipes<WeakPublish>},
    {"pipe_weak_observe", manyPipes<WeakObserve>},
    {"pipe_early_reuse", manyPipes<EarlyReuse>},
    {"pipe_without_doorbell", manyPipes<NoWake>},
};

}  // namespace

TEST(exchange_and_ring_hold_under_random_delays) {
  everything<Delayed>();
}

TEST(survivors_agree_wherever_ranks_die) {
  losses();
  losses<LossMistake::kNone, true>();
}

TEST(channels_hold_under_random_delays) {
  channels<Delayed>();
}

TEST(pipes_hold_under_random_delays) {
  manyPipes<Delayed>();
}

int main(int argc, char** argv) {
  return mutants::main(argc, argv, kMutants);
}
