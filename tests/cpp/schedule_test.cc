// The direct schedule (direct_schedule.h) run by threads: one for each rank's stream, which takes
// the steps of its calls in order, and more for the blocks of its kernels.  Real data, with random
// delays, with ranks that give up, and with mutants that must be caught (mutants.h).
// schedule_interleavings_test.cc shows that no order of steps is a wrong one; this, that the steps
// are told to the kernels and done by them as they should be.
#define CHECK_OWN_MAIN
#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <random>
#include <thread>

#include "cuda/communicator/host_ranks.h"
#include "cuda/kernels/stream_kernels.h"
#include "device_calls.h"
#include "mutants.h"
#include "ranks.h"

using namespace host;
using oracle::Case;
using Do = ScheduleStep::Do;
using Steps = std::vector<ScheduleStep>;

namespace {

constexpr Nanos kStalled = 20 * kSecond;

const Case& numbersOf(int P, DType dtype, ReduceOp op) {
  static std::map<std::tuple<int, DType, ReduceOp>, Case> cases;
  return cases.try_emplace({P, dtype, op}, P, dtype, op).first->second;
}

// Tensors that leaders use where they are, of an all-reduce: two bits for each rank.
constexpr uint32_t kNone = 0, kAll = ~uint32_t{0};

struct DirectMessage {
  Call call;
  bool shared = true;
  uint32_t located = kNone;
  size_t most = 0;    // of a part, elements or bytes, in a piece; 0: all
  int stranger = -1;  // a rank that makes another call

  bool input(int r) const { return located >> (2 * r) & 1; }
  bool output(int r) const { return located >> (2 * r + 1) & 1; }
};

// What else a mutant does.
struct Mutations {
  bool tells_late = false;   // where a tensor is, after `ready` says that it is told
  bool tells_early = false;  // where the next one is, in the place that leaders may still read
};

// Ranks with a thread for a stream each.  `mistake` poisons the steps of each call.
class Streams {
 public:
  using Mistake = std::function<void(Steps&)>;

  Streams(
      int P, uint64_t first, Mistake mistake = [](Steps&) {}, Mutations mutations = {})
      : P_(P), first_(first), mistake_(std::move(mistake)), mutations_(mutations) {
    table_.resize(at(P) * kMostSegments);
    for (int r = 0; r < P; ++r) {
      states_.push_back(std::make_unique<HostState>());
      told_.emplace_back(*states_.back(), kPlaces);
      for (int half = 0; half < kHalves; ++half)
        for (int p = 0; p < P; ++p) word(r, Word::kFree, half, p) = 1;
      staging_.emplace_back(kHalves * kHalf, 0);
    }
  }

  void add(const DirectMessage& m) {
    Entry& entry = calls_.emplace_back(m);
    for (int r = 0; r < P_; ++r) {
      Tensors& tensors = entry.tensors.emplace_back(m.call, r);
      Location& where = entry.locations.emplace_back();
      where.what = calls_.size() + (r == m.stranger);
      if (m.call.kind != Kind::kAllReduce) continue;
      if (m.input(r)) where.in = enter(r, tensors.input(), m.call.partBytes());
      if (m.output(r)) where.out = enter(r, tensors.output(), m.call.partBytes());
    }
    entry.ready.resize(at(P_));
  }

  // Runs all calls; `before(rank, call)` is called where a rank makes one.
  void run(const std::function<void(int, size_t)>& before = [](int, size_t) {}) {
    // An error of one ends the waits of all.
    ::ranks::inThreads(P_, [&](int r) {
      try {
        const auto tell = [&](size_t i) {
          if (i >= calls_.size()) return;
          Location where = calls_[i].locations[at(r)];
          calls_[i].ready[at(r)] = told_[at(r)].tell(where, i, false);
          CHECK(where == calls_[i].locations[at(r)] || states_[at(r)]->abort.isSet(0));
        };
        tell(0);
        for (size_t i = 0; i < calls_.size(); ++i) {
          before(r, i);
          // Its host is a call ahead.
          if (mutations_.tells_early) states_[at(r)]->finished.publish(i + 1);
          if (!mutations_.tells_early) tell(i + 1);
          const DirectMessage& m = calls_[i].message;
          const size_t all = m.call.moves() ? m.call.partBytes() : m.call.count;
          const size_t most = m.most > 0 ? m.most : std::max<size_t>(all, 1);
          const std::vector<Span> pieces = piecesOf(all, most);
          const int root = m.call.kind == Kind::kBroadcast ? m.call.root : kEverybody;
          const uint64_t first = first_ + schedules_[at(r)];
          Steps steps = m.call.kind == Kind::kAllReduce
                            ? directSchedule(r, P_, pieces, first, m.shared, !m.input(r))
                            : ownSchedule(r, P_, pieces, first, root);
          mistake_(steps);
          for (const ScheduleStep& step : steps) {
            mutants::randomDelay();
            perform(r, calls_[i], step);
            if (mutations_.tells_early && &step == &steps.back() - steps.size() / 2) tell(i + 1);
          }
          schedules_[at(r)] += pieces.size();
          states_[at(r)]->finished.publish(i + 1);
        }
        ++over_;
      } catch (...) {
        broken_ = true;
        throw;
      }
    });
  }

  // What a failure does: first every rank's abort flag, only then the words that streams wait for.
  // These again and again, since a stream that goes on sets them back.
  void setAbort(int rank) { states_[at(rank)]->abort.set(); }
  void setAborts() {
    for (int r = 0; r < P_; ++r) setAbort(r);
  }
  void releaseWaits(int rank) {
    for (StreamWord& line : states_[at(rank)]->words)
      std::atomic_ref(line.word).store(kReleased, std::memory_order_release);
  }
  void releaseWaits() {
    while (over_ < P_ && !broken_) {
      for (int r = 0; r < P_; ++r) releaseWaits(r);
      std::this_thread::yield();
    }
  }
  int waiting() const { return waiting_; }
  // That the rank's kernels have loaded and stored.
  uint64_t bytesMoved(int rank) const { return bytes_[at(rank)]; }

  bool isPoisoned(size_t call, int rank) {
    const Bytes output = calls_[call].tensors[at(rank)].result();
    return std::all_of(output.begin(), output.end(), [](unsigned char b) { return b == 0xff; });
  }
  bool foundStranger(int rank) const {
    return states_[at(rank)]->trouble.cause == static_cast<uint64_t>(Cause::kMismatch);
  }
  void expectRight(size_t call, int rank) { calls_[call].tensors[at(rank)].verify(); }
  void expectAllRight() {
    for (int r = 0; r < P_; ++r) {
      for (size_t i = 0; i < calls_.size(); ++i) expectRight(i, r);
      CHECK_EQ(states_[at(r)]->delivered, schedules_[at(r)]);
      CHECK_EQ(states_[at(r)]->busy, 0u);
      for (int half = 0; half < kHalves; ++half)
        for (int p = 0; p < P_; ++p) {
          CHECK_EQ(word(r, Word::kReady, half, p), 0u);
          CHECK_EQ(word(r, Word::kFree, half, p), 1u);
        }
    }
  }

 private:
  struct Entry {
    explicit Entry(const DirectMessage& m) : message(m) {}
    DirectMessage message;
    std::deque<Tensors> tensors;
    std::vector<Location> locations;
    std::vector<uint32_t> ready;  // what each rank sets its words to
  };
  static constexpr Shape kKernel{1, 2, 2};
  static constexpr uint32_t kPlaces = 2;  // of calls under way

  // Makes a tensor known as one in a segment of its own, behind something else.
  Place enter(int r, unsigned char* data, size_t bytes) {
    constexpr size_t kBefore = 64;
    const uint64_t number = ++segments_;
    table_[at(r) * kMostSegments + number % kMostSegments] = {
        .number = number,
        .data = reinterpret_cast<std::byte*>(data) - kBefore,
        .bytes = bytes + kBefore};
    return {.segment = number, .offset = kBefore};
  }

  static size_t at(int i) { return static_cast<size_t>(i); }
  static std::byte* bytes(unsigned char* p) { return reinterpret_cast<std::byte*>(p); }
  static constexpr size_t kHalf = oracle::kMost * 8;
  std::byte* staging(int r, int half) { return bytes(staging_[at(r)].data()) + at(half) * kHalf; }
  uint32_t& word(int waiter, Word which, int half, int setter) {
    return states_[at(waiter)]->words[wordIndex(which, half, setter, P_)].word;
  }

  void await(uint32_t& word) {
    const Nanos deadline = now() + kStalled;
    ++waiting_;
    while (static_cast<int32_t>(std::atomic_ref(word).load(std::memory_order_acquire) - 1) < 0) {
      if (now() > deadline || broken_) throw std::runtime_error("the schedule has stalled");
      std::this_thread::yield();
    }
    --waiting_;
  }

  void perform(int r, Entry& entry, const ScheduleStep& step) {
    HostState& own = *states_[at(r)];
    uint32_t& word = states_[at(waiterOf(step))]->words[wordIndex(step, P_)].word;
    switch (step.what) {
      case Do::kBegin:
        return std::atomic_ref(own.busy).store(1, std::memory_order_relaxed);
      case Do::kSet: {
        const uint32_t value = step.word == Word::kReady ? entry.ready[at(r)] : 1;
        Location* const told = value > kInHalf ? &own.told[value - kInHalf - 1] : nullptr;
        const bool late = mutations_.tells_late && told;
        if (late) *told = {};
        std::atomic_ref(word).store(value, std::memory_order_release);
        if (late) *told = entry.locations[at(r)];
        return;
      }
      case Do::kLook:
        return look(r, entry, step);
      case Do::kAwait:
        return await(word);
      case Do::kTake:
        return std::atomic_ref(word).store(0, std::memory_order_relaxed);
      case Do::kDeliver: {
        const DirectMessage& m = entry.message;
        std::byte* output = bytes(entry.tensors[at(r)].output());
        const size_t size = m.call.outputParts() * m.call.partBytes();
        const bool copies = m.call.kind == Kind::kAllReduce && !m.output(r);
        const bool keeps = m.call.kind == Kind::kBroadcast && m.call.root == r;
        const size_t width = copies ? m.call.numbers->width() : 0;
        const DeliverCall call{.from = copies ? staging(r, step.half) : nullptr,
                               .to = output + step.piece.begin * width,
                               .bytes = step.piece.size * width,
                               .abort = &own.abort,
                               .delivered = &own.delivered,
                               .local = &local_[at(r)],
                               .output = output,
                               .output_bytes = keeps ? 0 : size,
                               .poison = poisonOf(m.call.numbers->dtype)};
        inBlocks(r, [&](host::Block& block, int channel) {
          deliver(block, call, channel, kKernel.blocks);
        });
        return;
      }
      case Do::kEnd:
        return std::atomic_ref(own.busy).store(0, std::memory_order_relaxed);
      default:
        if (entry.message.call.moves()) return move(r, entry, step);
        return entry.message.call.numbers->dtype == DType::kFloat32
                   ? compute<Element<DType::kFloat32>>(r, entry, step)
                   : compute<Element<DType::kBFloat16>>(r, entry, step);
    }
  }

  void look(int r, Entry& entry, const ScheduleStep& step) {
    const DirectMessage& m = entry.message;
    const size_t width = m.call.numbers->width();
    LookCall call{.rank = r,
                  .size = P_,
                  .ready = &states_[at(r)]->words[wordIndex(Word::kReady, step.half, 0, P_)],
                  .told = {},
                  .half = {},
                  .input = m.input(r) ? bytes(entry.tensors[at(r)].input()) : nullptr,
                  .output = m.output(r) ? bytes(entry.tensors[at(r)].output()) : nullptr,
                  .bytes = m.call.partBytes(),
                  .begin = step.piece.begin * width,
                  .what = entry.locations[at(r)].what,
                  .table = table_.data(),
                  .found = &found_[at(r)],
                  .abort = {},
                  .local = &local_[at(r)],
                  .trouble = &states_[at(r)]->trouble,
                  .operation = 0};
    for (int p = 0; p < P_; ++p) {
      call.told[p] = states_[at(p)]->told;
      call.half[p] = staging(p, step.half);
      call.abort[p] = &states_[at(p)]->abort;
    }
    host::run({1, 1, 2}, 1, [&](host::Block& block, int, int, size_t) {
      Look<DeviceRules, host::Block>(block, call).run();
    });
  }

  template <class Body>
  void inBlocks(int r, Body body) {
    bytes_[at(r)] += host::run(
        kKernel, 1, [&](host::Block& block, int, int channel, size_t) { body(block, channel); })[0];
  }

  StagedAt stagedAt(int r, int half) {
    StagedAt staged{.rank = r, .size = P_, .base = {}, .abort = &states_[at(r)]->abort};
    for (int p = 0; p < P_; ++p) staged.base[p] = staging(p, half);
    return staged;
  }

  void move(int r, Entry& entry, const ScheduleStep& step) {
    const Call& m = entry.message.call;
    const StagedAt staged = stagedAt(r, step.half);
    const Span part = step.piece;
    Tensors& tensors = entry.tensors[at(r)];
    CarryCall call{};
    if (step.what == Do::kStage)
      call = carryOne(staged, bytes(tensors.input()) + part.begin, staged.base[r], part.size);
    else if (m.kind == Kind::kBroadcast)
      call = carryOne(staged, staged.base[m.root], bytes(tensors.output()) + part.begin, part.size);
    else
      call = gatherParts(staged, tensors.input(), tensors.output(), m.partBytes(), part);
    inBlocks(r, [&](host::Block& block, int channel) {
      if (m.unit() == 1)
        carry<2>(block, call, channel, kKernel.blocks);
      else
        carry<4>(block, call, channel, kKernel.blocks);
    });
  }

  template <class E>
  void compute(int r, Entry& entry, const ScheduleStep& step) {
    const DirectMessage& m = entry.message;
    const Call& c = m.call;
    const ReduceOp op = c.numbers->op;
    const size_t width = c.numbers->width();
    const StagedAt staged = stagedAt(r, step.half);
    Arithmetic arithmetic{combineOf(c.numbers->dtype, op), op == ReduceOp::kAvg,
                          op == ReduceOp::kPremulSum, P_, oracle::factorOf(r)};
    std::byte* const input = bytes(entry.tensors[at(r)].input());
    const auto stage = [&](size_t from, size_t to, size_t count) {
      const CopyCall call{input + from * width, staged.base[r] + to * width, count, arithmetic,
                          &states_[at(r)]->abort};
      inBlocks(r, [&](host::Block& block, int channel) {
        copyIn<E>(block, call, channel, kKernel.blocks);
      });
    };
    const bool scatters = c.kind == Kind::kReduceScatter;
    if (step.what == Do::kStage)
      return scatters ? stageParts(P_, c.count, step.piece, stage)
                      : stage(step.piece.begin, 0, step.piece.size);
    DirectCall call{.size = P_,
                    .sinks = P_,
                    .chunk = Cut{c.count, P_}.chunkSize(),
                    .begin = step.elements.begin,
                    .elements = step.elements.size,
                    .first = step.piece.begin,
                    .tensors = {},
                    .arithmetic = arithmetic,
                    .abort = &states_[at(r)]->abort,
                    .found = &found_[at(r)]};
    if (scatters)
      call =
          addParts(staged, entry.tensors[at(r)].output(), c.count, step.piece, width, arithmetic);
    inBlocks(r, [&](host::Block& block, int channel) {
      direct<E>(block, call, block.peers(), channel, kKernel.blocks);
    });
  }

  const int P_;
  const uint64_t first_;
  const Mistake mistake_;
  const Mutations mutations_;
  std::vector<std::unique_ptr<HostState>> states_;
  std::deque<ToldLocations> told_;
  std::vector<SegmentEntry> table_;  // of all ranks, who share one memory
  uint64_t segments_ = 0;
  std::array<PeerTensors, kMostRanks> found_{};
  std::deque<Tensor> staging_;
  std::array<Local, kMostRanks> local_{};
  std::array<uint64_t, kMostRanks> schedules_{}, bytes_{};
  std::deque<Entry> calls_;
  std::atomic<int> over_{0}, waiting_{0};
  std::atomic<bool> broken_{false};
};

// Calls of all kinds in a row; only inputs that are staged can be scaled.
void fill(Streams& streams, int P, int calls) {
  std::minstd_rand random(static_cast<unsigned>(P));
  for (int i = 0; i < calls; ++i) {
    const bool scales = random() % 6 == 0, half = random() % 3 == 0;
    const ReduceOp op = scales ? ReduceOp::kPremulSum : half ? ReduceOp::kAvg : ReduceOp::kSum;
    constexpr uint32_t kOutputs = 0xaaaaaaaa;
    const uint32_t which[] = {kNone, kAll, random() % 2 ? kOutputs : kAll / 3,
                              static_cast<uint32_t>(random())};
    constexpr Kind kKinds[] = {Kind::kAllReduce, Kind::kAllReduce, Kind::kReduceScatter,
                               Kind::kAllGather, Kind::kBroadcast};
    const Kind kind = kKinds[random() % std::size(kKinds)];
    const size_t parts = kind == Kind::kAllReduce ? 1 : static_cast<size_t>(P);
    const size_t count = random() % 4 == 0 ? random() % 300 : random() % (oracle::kMost / parts);
    streams.add({.call = {.kind = kind,
                          .numbers = &numbersOf(P, half ? DType::kBFloat16 : DType::kFloat32, op),
                          .count = std::min(count, oracle::kMost / parts),
                          .in_place = random() % 2 == 0,
                          .place = Alignment::kApart,
                          .root = static_cast<int>(random() % static_cast<unsigned>(P))},
                 .shared = random() % 2 == 0,
                 .located = which[random() % 4] & (scales ? kOutputs : kAll),
                 .most = random() % 2 == 0 ? kChunkElements << random() % 3 : 0});
  }
}

// Calls of one kind but all-reduce, as long as can be.
void partsOf(Kind kind, int count, Streams::Mistake mistake) {
  constexpr int P = 3;
  Streams streams(P, 0, std::move(mistake));
  for (int i = 0; i < count; ++i)
    streams.add({.call = {.kind = kind,
                          .numbers = &numbersOf(P, DType::kFloat32, ReduceOp::kSum),
                          .count = oracle::kMost / P,
                          .root = i % P},
                 .most = 512});
  streams.run();
  streams.expectAllRight();
}

void calls(int P, int count, Streams::Mistake mistake = [](Steps&) {}, Mutations mutations = {}) {
  Streams streams(P, ~uint64_t{0} - 5, std::move(mistake), mutations);
  fill(streams, P, count);
  streams.run();
  streams.expectAllRight();
}

Streams::Mistake without(Do what, Word word) {
  return [=](Steps& steps) {
    std::erase_if(steps, [=](const ScheduleStep& s) { return s.what == what && s.word == word; });
  };
}

// Each step of a kind comes right before the one of another kind that it follows.
Streams::Mistake before(Do what, Word word, Do where) {
  return [=](Steps& steps) {
    for (size_t i = 1; i < steps.size(); ++i)
      for (size_t k = i; k > 0 && steps[k].what == what && steps[k].word == word; --k) {
        std::swap(steps[k], steps[k - 1]);
        if (steps[k].what == where) break;
      }
  };
}

// A leader looks before the owners are ready; and when it has told them that it is done.
void looksEarly(Steps& steps) {
  for (size_t i = 0; i < steps.size(); ++i)
    for (size_t k = i; steps[i].what != Do::kTake && k > 0 && steps[k].what == Do::kLook &&
                       steps[k - 1].what == Do::kAwait;
         --k)
      std::swap(steps[k], steps[k - 1]);
}
void looksLate(Steps& steps) {
  for (size_t k = 0; k + 1 < steps.size(); ++k) {
    const Do next = steps[k + 1].what;
    if (steps[k].what == Do::kLook && (next == Do::kTake || next == Do::kLead || next == Do::kSet))
      std::swap(steps[k], steps[k + 1]);
  }
}

// The owner of a half waits for one of its readers.
void awaitsOneReader(Steps& steps) {
  int last = -1;
  std::erase_if(steps, [&](const ScheduleStep& s) {
    const bool waits = s.what == Do::kAwait && s.word == Word::kFree;
    const bool again = waits && last >= 0;
    last = waits ? s.leader : -1;
    return again;
  });
}

// Rank 1 makes its third call only after the others have given up waiting for it.  The sums of that
// call are nobody's, whoever gave up first.
enum class GivesUp { kTogether, kAloneFirst };
void late(uint32_t located, GivesUp how, Kind kind = Kind::kAllReduce) {
  constexpr int P = 3;
  constexpr size_t kCalls = 6, kLate = 2;
  Streams streams(P, 0);
  for (size_t i = 0; i < kCalls; ++i)
    streams.add({.call = {.kind = kind,
                          .numbers = &numbersOf(P, DType::kFloat32, ReduceOp::kSum),
                          .count = oracle::kMost / (kind == Kind::kAllReduce ? 1 : P) - i,
                          .root = 1},
                 .located = located});
  std::atomic<int> came = 0;
  std::atomic<bool> go_on = false;
  std::thread host([&] {
    while (came < P || streams.waiting() < P - 1) std::this_thread::yield();
    if (how == GivesUp::kAloneFirst) {
      streams.setAbort(0);
      streams.releaseWaits(0);
      go_on = true;
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
    }
    streams.setAborts();
    go_on = true;
    streams.releaseWaits();
  });
  std::exception_ptr error;
  try {
    streams.run([&](int rank, size_t call) {
      if (call == kLate) ++came;
      while (call == kLate && rank == 1 && !go_on) std::this_thread::yield();
    });
  } catch (...) {
    error = std::current_exception();
  }
  host.join();
  if (error) std::rethrow_exception(error);
  for (int r = 0; r < P; ++r)
    for (size_t i = 0; i < kCalls; ++i) {
      if (i < kLate || (kind == Kind::kBroadcast && r == 1))
        streams.expectRight(i, r);
      else
        CHECK(streams.isPoisoned(i, r));
    }
}

const mutants::Mutants kMutants{
    {"free_before_it_was_led", [] { calls(3, 30, before(Do::kSet, Word::kFree, Do::kLead)); }},
    {"ready_before_it_is_staged", [] { calls(3, 30, before(Do::kSet, Word::kReady, Do::kStage)); }},
    {"no_await_ready", [] { calls(3, 30, without(Do::kAwait, Word::kReady)); }},
    {"no_await_free", [] { calls(3, 30, without(Do::kAwait, Word::kFree)); }},
    {"no_take_ready", [] { calls(3, 30, without(Do::kTake, Word::kReady)); }},
    {"no_take_free", [] { calls(3, 30, without(Do::kTake, Word::kFree)); }},
    {"scattered_before_ready",
     [] { partsOf(Kind::kReduceScatter, 20, without(Do::kAwait, Word::kReady)); }},
    {"gathered_before_ready",
     [] { partsOf(Kind::kAllGather, 20, without(Do::kAwait, Word::kReady)); }},
    {"staged_before_it_was_read",
     [] { partsOf(Kind::kBroadcast, 20, without(Do::kAwait, Word::kFree)); }},
    {"one_reader_answers_for_all", [] { partsOf(Kind::kBroadcast, 20, awaitsOneReader); }},
    {"pieces_in_one_half",
     [] {
       partsOf(Kind::kBroadcast, 20, [](Steps& steps) {
         for (ScheduleStep& s : steps)
           if (s.what == Do::kStage || s.what == Do::kLead) s.half = 0;
       });
     }},
    {"one_rank_gives_up_alone", [] { late(kNone, GivesUp::kAloneFirst); }},
    {"told_too_late", [] { calls(3, 30, [](Steps&) {}, {.tells_late = true}); }},
    {"told_in_a_place_in_use", [] { calls(3, 30, [](Steps&) {}, {.tells_early = true}); }},
    {"looked_before_ready", [] { calls(3, 30, looksEarly); }},
    {"looked_after_free", [] { calls(3, 30, looksLate); }},
};

}  // namespace

TEST(calls_of_all_kinds_hold_under_random_delays) {
  for (int P = 2; P <= 8; ++P) calls(P, 40 - 4 * P);
}

TEST(every_element_is_led_once) {
  for (int P = 2; P <= 8; ++P)
    for (size_t count : {size_t{0}, size_t{1}, size_t{128}, size_t{1000}, size_t{4099}})
      for (bool shared : {false, true})
        for (uint64_t call = 0; call < 9; ++call) {
          const std::vector<Span> pieces = piecesOf(count, call % 2 ? 256 : SIZE_MAX);
          std::vector<Span> led;
          for (int r = 0; r < P; ++r)
            for (const ScheduleStep& s : directSchedule(r, P, pieces, call, shared, true))
              if (s.what == Do::kLead) led.push_back(s.elements);
          CHECK_EQ(led.size(), pieces.size() * (shared ? static_cast<size_t>(P) : 1));
          std::sort(led.begin(), led.end(), [](Span a, Span b) {
            return std::pair(a.begin, a.size) < std::pair(b.begin, b.size);
          });
          size_t end = 0;
          for (const Span& s : led) {
            CHECK_EQ(s.begin, end);
            end = s.end();
          }
          CHECK_EQ(end, count);
        }
}

// What stream_kernels.h says of them.
TEST(calls_of_parts_move_the_bytes_that_the_header_says) {
  for (const int P : {2, 3, 5})
    for (const bool in_place : {false, true})
      for (const Kind kind : {Kind::kReduceScatter, Kind::kAllGather, Kind::kBroadcast}) {
        const Call call{.kind = kind,
                        .numbers = &numbersOf(P, DType::kFloat32, ReduceOp::kSum),
                        .count = 3 * kChunkElements,
                        .in_place = in_place,
                        .root = 1};
        Streams streams(P, 0);
        streams.add({.call = call, .most = 256});
        streams.run();
        streams.expectAllRight();
        const auto p = static_cast<uint64_t>(P);
        const uint64_t parts = kind == Kind::kReduceScatter ? 3 * p + 1
                               : kind == Kind::kBroadcast   ? 2
                               : in_place                   ? 2 * p
                                                            : 2 * p + 2;
        for (int r = 0; r < P; ++r) CHECK_EQ(streams.bytesMoved(r), parts * call.partBytes());
      }
}

TEST(who_gives_up_poisons_outputs_and_waits_no_more) {
  for (int again = 0; again < 5; ++again)
    for (const uint32_t located : {kNone, kAll, 0b100110u}) late(located, GivesUp::kTogether);
  for (Kind kind : {Kind::kReduceScatter, Kind::kAllGather, Kind::kBroadcast})
    late(kNone, GivesUp::kTogether, kind);
}

// The leaders, of which there may be one, find it where a tensor is told; nothing else is at risk.
TEST(a_rank_in_another_call_is_found_before_its_tensor_is_touched) {
  constexpr int P = 3;
  for (const bool shared : {false, true})
    for (int stranger = 0; stranger < P; ++stranger) {
      Streams streams(P, 0);
      streams.add({.call = {.kind = Kind::kAllReduce,
                            .numbers = &numbersOf(P, DType::kFloat32, ReduceOp::kSum),
                            .count = 1000},
                   .shared = shared,
                   .located = kAll,
                   .stranger = stranger});
      streams.run();
      for (int r = 0; r < P; ++r) {
        CHECK(streams.isPoisoned(0, r));
        CHECK_EQ(streams.foundStranger(r), shared || r == 0);
      }
    }
}

// Rank 1 makes its third broadcast only after the group has given up.  The root puts two more into
// its halves and the other reader gets them; then both wait.
TEST(a_root_goes_on_until_it_is_two_pieces_ahead_of_a_reader) {
  constexpr int P = 3;
  constexpr size_t kCalls = 6, kLate = 2, kStops = 4;
  Streams streams(P, 0);
  for (size_t i = 0; i < kCalls; ++i)
    streams.add({.call = {.kind = Kind::kBroadcast,
                          .numbers = &numbersOf(P, DType::kFloat32, ReduceOp::kSum),
                          .count = 700 + i,
                          .root = 0}});
  std::atomic<int> came = 0;
  std::atomic<bool> go_on = false;
  std::thread host([&] {
    const Nanos deadline = now() + kStalled;
    while ((came < P || streams.waiting() < P - 1) && now() < deadline) std::this_thread::yield();
    streams.setAborts();
    go_on = true;
    streams.releaseWaits();
  });
  streams.run([&](int rank, size_t call) {
    if (call == (rank == 1 ? kLate : kStops)) ++came;
    while (call == kLate && rank == 1 && !go_on) std::this_thread::yield();
  });
  host.join();
  CHECK_EQ(came.load(), P);
  for (int r = 0; r < P; ++r)
    for (size_t i = 0; i < kCalls; ++i) {
      if (r == 0 || i < (r == 1 ? kLate : kStops))
        streams.expectRight(i, r);
      else
        CHECK(streams.isPoisoned(i, r));
    }
}

// The call's output comes in two pieces, the second by two blocks, and the group gives up between
// these: nothing of the output may look right, and an optimizer must know.
TEST(what_is_given_up_in_the_middle_is_poisoned_as_a_whole) {
  for (DType dtype : {DType::kBFloat16, DType::kComplex64, DType::kInt64, DType::kBool}) {
    constexpr size_t kPiece = 4096;
    constexpr std::byte kBefore{0x5a};
    std::vector<std::byte> staging(kPiece, kBefore), output(3 * kPiece, kBefore);
    AbortFlag abort{};
    uint64_t delivered = 0;
    Local local{};
    const DeliverCall call{.from = staging.data(),
                           .to = output.data() + kPiece,
                           .bytes = kPiece,
                           .abort = &abort,
                           .delivered = &delivered,
                           .local = &local,
                           .output = output.data(),
                           .output_bytes = 2 * kPiece,
                           .poison = poisonOf(dtype)};
    host::Team team(1);
    host::Block block(team, 0);
    deliver(block, call, 0, 2);
    abort.set();
    CHECK_EQ(local.found_inf, 0.f);
    deliver(block, call, 1, 2);
    const bool is_integer = dtype == DType::kInt64 || dtype == DType::kBool;
    for (size_t i = 0; i < output.size(); ++i)
      CHECK_EQ(static_cast<int>(output[i]), i >= 2 * kPiece ? 0x5a : is_integer ? 0 : 0xff);
    CHECK_EQ(local.found_inf, 1.f);
    CHECK_EQ(delivered, 1u);
    CHECK_EQ(local.blocks_done, 0u);
  }
}

int main(int argc, char** argv) {
  return mutants::main(argc, argv, kMutants);
}
