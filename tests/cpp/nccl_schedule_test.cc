// The ring between hosts (cuda/internode/nccl_schedule.h): its steps run by two threads a rank, for
// the two streams, with the kernels' own text, over a stand-in for NCCL that moves bytes.  And that
// nothing but events orders what must be ordered, whatever the streams' pace.
#include "cuda/internode/nccl_schedule.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <random>

#include "check.h"
#include "cuda/internode/nccl.h"
#include "cuda/kernels/stream_kernels.h"
#include "device_calls.h"
#include "fake_nccl.h"
#include "mutants.h"
#include "ranks.h"
#include "thread_gpu.h"

using namespace host;
using oracle::Case;
using Do = RingStep::Do;
using In = RingPlace::In;
using Steps = std::vector<RingStep>;

namespace {

static_assert(ringSlice(size_t{1} << 28, 2, 4) * 4 == cuda::kRingBytes);
static_assert(ringSlice(1 << 20, 2, 4) == (1 << 18) && ringSlice(100, 2, 4) == 128);

FakeNccl& freshNccl() {
  static void* const handle = dlopen(RINGREDUCE_FAKE_NCCL, RTLD_NOW | RTLD_LOCAL);
  if (!handle) throw std::runtime_error(dlerror());
  auto& state = *static_cast<FakeNccl*>(dlsym(handle, "fake_nccl"));
  state = FakeNccl{};
  state.moves = true;
  state.enqueue = [](void* stream, void (*run)(void*), void* work) {
    static_cast<thread_gpu::Stream*>(stream)->put([run, work] {
      mutants::randomDelay();
      run(work);
    });
  };
  return state;
}

// With a wire wider than the dtype and with one as wide; device_test.cc adds the other dtypes.
constexpr DType kTested[] = {DType::kFloat16, DType::kFloat32};

struct Sum {
  const Case* numbers;
  size_t count, slice;
  bool in_place;
  size_t shift;  // of tensors, in elements
};

RingPlan planOf(const Sum& m, int rank) {
  return {.rank = rank,
          .size = m.numbers->P,
          .count = m.count,
          .slice = m.slice,
          .wide = travelsWide(m.numbers->dtype, m.numbers->P),
          .scaled = m.numbers->op == ReduceOp::kPremulSum};
}

// What a rank's GPU would be asked to do, done by threads.
class Rank {
 public:
  Rank(std::shared_ptr<const NcclLibrary> library, const NcclId& id, int rank, int size)
      : comm_(std::move(library), id, rank, size), rank_(rank), size_(size) {
    for (auto& slot : slots_) slot.resize(kSlot);
  }

  void put(const Sum& m, Tensor& input, Tensor& output) {
    for (const RingStep& step : ringSteps(planOf(m, rank_))) {
      thread_gpu::Stream& stream = isOnWire(step) ? wire_ : adding_;
      if (step.waits >= 0) {
        Event& event = events_[at(step.waits)];
        stream.put([&event, n = event.recorded] {
          while (event.reached.load(std::memory_order_acquire) < n) std::this_thread::yield();
        });
      }
      perform(m, step, input, output);
      if (step.records >= 0) {
        Event& event = events_[at(step.records)];
        stream.put(
            [&event, n = ++event.recorded] { event.reached.store(n, std::memory_order_release); });
      }
    }
  }
  void wait() {
    const uint64_t last = adding_.put([] {});
    while (!adding_.isDone(last)) std::this_thread::yield();
  }

 private:
  struct Event {
    uint64_t recorded = 0;  // by who puts steps into streams
    std::atomic<uint64_t> reached{0};
  };
  static constexpr size_t kSlot = oracle::kMost * 16;
  static constexpr int kBlocks = 2;

  static size_t at(int i) { return static_cast<size_t>(i); }

  std::byte* place(const Sum& m, const RingPlace& p, size_t begin, Tensor& in, Tensor& out) {
    const size_t width = m.numbers->width();
    switch (p.in) {
      case In::kInput:
        return reinterpret_cast<std::byte*>(in.data()) + begin * width;
      case In::kOutput:
        return reinterpret_cast<std::byte*>(out.data()) + begin * width;
      case In::kAddends:
        return slots_[p.slot].data() + (isWide(m) ? m.slice * sizeof(float) : 0);
      default:
        return slots_[p.slot].data();
    }
  }
  bool isWide(const Sum& m) const { return planOf(m, rank_).wide; }
  size_t bytesOf(const Sum& m, const RingPlace& p, size_t n) const {
    return n * (p.in == In::kSums && isWide(m) ? sizeof(float) : m.numbers->width());
  }

  void perform(const Sum& m, const RingStep& step, Tensor& in, Tensor& out) {
    const size_t n = step.elements.size;
    std::byte* from = place(m, step.from, step.elements.begin, in, out);
    std::byte* to =
        place(m, step.to, isOnWire(step) ? step.coming.begin : step.elements.begin, in, out);
    if (isOnWire(step)) {
      NcclGroup group(comm_.library());
      auto* stream = reinterpret_cast<NcclStream>(&wire_);
      if (n > 0) comm_.send(from, bytesOf(m, step.from, n), (rank_ + 1) % size_, stream);
      if (step.coming.size > 0)
        comm_.recv(to, bytesOf(m, step.to, step.coming.size), (rank_ + size_ - 1) % size_, stream);
      return group.end();
    }
    if (step.what != Do::kStage && step.what != Do::kAdd) return;
    const ReduceOp op = m.numbers->op;
    const Arithmetic arithmetic{combineOf(m.numbers->dtype, op), op == ReduceOp::kAvg,
                                op == ReduceOp::kPremulSum, size_, oracle::factorOf(rank_)};
    const std::byte* own = place(m, {In::kInput}, step.elements.begin, in, out);
    const RingStepCall add{.partial = from,
                           .own = own,
                           .to = to,
                           .count = n,
                           .partial_is_wide = step.from.in == In::kSums && isWide(m),
                           .to_is_wide = step.to.in == In::kSums && isWide(m),
                           .last = step.last,
                           .arithmetic = arithmetic,
                           .factor = nullptr};
    const bool stages = step.what == Do::kStage;
    adding_.put([this, add, stages, dtype = m.numbers->dtype] {
      mutants::randomDelay();
      const auto with = [&]<DType t>() {
        Team team(1);
        Block block(team, 0);
        for (int b = 0; b < kBlocks; ++b)
          if (stages)
            copyIn<Element<t>>(block, {add.own, add.to, add.count, add.arithmetic, &abort_}, b,
                               kBlocks);
          else
            addRingStep<Element<t>>(block, add, b, kBlocks);
      };
      if (dtype == DType::kFloat16)
        with.template operator()<DType::kFloat16>();
      else
        with.template operator()<DType::kFloat32>();
    });
  }

  NcclCommunicator comm_;
  const int rank_, size_;
  std::array<std::vector<std::byte>, kRingSlots> slots_;
  std::array<Event, kRingEvents> events_;
  AbortFlag abort_{};
  thread_gpu::Stream wire_, adding_;
};

// All messages one after the other, without waiting in between; then what came of them.
void runAll(int P, const std::vector<Sum>& messages) {
  FakeNccl& nccl = freshNccl();
  const auto library = NcclLibrary::load(RINGREDUCE_FAKE_NCCL);
  const NcclId id = library->makeId();
  ::ranks::inThreads(P, [&](int r) {
    std::deque<Tensor> inputs, outputs;
    const auto at = [](int i) { return static_cast<size_t>(i); };
    for (const Sum& m : messages) {
      const size_t bytes = m.count * m.numbers->width(), shift = m.shift * m.numbers->width();
      std::memcpy(inputs.emplace_back(bytes, shift).data(), m.numbers->addends[at(r)].data(),
                  bytes);
      if (!m.in_place) outputs.emplace_back(bytes, 0);
    }
    const auto output = [&](size_t i) -> Tensor& {
      size_t before = 0;
      for (size_t k = 0; k < i; ++k) before += !messages[k].in_place;
      return messages[i].in_place ? inputs[i] : outputs[before];
    };
    {
      Rank rank(library, id, r, P);
      for (size_t i = 0; i < messages.size(); ++i) rank.put(messages[i], inputs[i], output(i));
      rank.wait();
    }
    for (size_t i = 0; i < messages.size(); ++i) {
      const Sum& m = messages[i];
      m.numbers->expect(output(i).bytes(), m.numbers->canonical(m.count), "between hosts");
      CHECK(output(i).intactAround() && inputs[i].intactAround());
    }
  });
  CHECK_EQ(std::string(nccl.complaint), "");
}

// ---- what orders the steps

// What a step touches of its rank's memory, in bytes.
struct Access {
  int space;  // 0 the input, 1 the output, 2 and on the slots
  size_t begin, end;
  bool writes;
  bool conflicts(const Access& o) const {
    return space == o.space && (writes || o.writes) && begin < o.end && o.begin < end;
  }
};

std::vector<Access> accesses(const RingStep& step, const RingPlan& plan, bool in_place) {
  std::vector<Access> all;
  const size_t value = plan.wide ? 2 : 1;  // in elements
  const auto touch = [&](const RingPlace& p, Span s, bool writes) {
    if (s.size == 0) return;
    switch (p.in) {
      case In::kInput:
      case In::kOutput:
        all.push_back({p.in == In::kOutput && !in_place, s.begin, s.end(), writes});
        break;
      case In::kSums:
        all.push_back({2 + static_cast<int>(p.slot), 0, s.size * value, writes});
        break;
      case In::kAddends: {
        const size_t begin = plan.wide ? plan.slice * value : 0;
        all.push_back({2 + static_cast<int>(p.slot), begin, begin + s.size, writes});
        break;
      }
      default:
        break;
    }
  };
  touch(step.from, step.elements, false);
  touch(step.to, isOnWire(step) ? step.coming : step.elements, true);
  if (step.what == Do::kAdd) touch({In::kInput}, step.elements, false);
  // Before the call the input is written, after it the output is read, and both may be written.
  if (step.what == Do::kBegin || step.what == Do::kEnd)
    for (int space : {0, 1}) all.push_back({space, 0, plan.count, true});
  return all;
}

// Pairs of steps of one or several calls that touch the same memory in no order.
size_t hazards(const std::vector<Steps>& calls, const RingPlan& plan, bool in_place) {
  struct Seen {
    RingStep step;
    size_t order[2];  // how many steps of each stream come before or are this one
  };
  std::vector<Seen> seen;
  size_t clocks[2][2] = {}, events[kRingEvents][2] = {}, put[2] = {};
  size_t found = 0;
  for (const Steps& steps : calls)
    for (const RingStep& step : steps) {
      const int mine = isOnWire(step);
      if (step.waits >= 0)
        for (int s : {0, 1}) clocks[mine][s] = std::max(clocks[mine][s], events[step.waits][s]);
      clocks[mine][mine] = ++put[mine];
      for (const Seen& other : seen) {
        const int theirs = isOnWire(other.step);
        if (clocks[mine][theirs] >= other.order[theirs]) continue;
        for (const Access& a : accesses(step, plan, in_place))
          for (const Access& b : accesses(other.step, plan, in_place)) found += a.conflicts(b);
      }
      seen.push_back({step, {clocks[mine][0], clocks[mine][1]}});
      if (step.records >= 0)
        for (int s : {0, 1}) events[step.records][s] = clocks[mine][s];
    }
  return found;
}

}  // namespace

TEST(all_ops_have_the_bits_of_the_canonical_ring) {
  std::minstd_rand random(1);
  for (int P = 2; P <= 8; ++P) {
    std::deque<Case> cases;
    std::vector<Sum> messages;
    for (DType dtype : kTested)
      for (int o = 0; o < kReduceOps; ++o) {
        const auto op = static_cast<ReduceOp>(o);
        if (!isSupported(dtype, op) || (P > 3 && (static_cast<int>(dtype) + o) % 2 != P % 2))
          continue;
        cases.emplace_back(P, dtype, op);
        const size_t count = random() % 3 == 0 ? random() % 700 : random() % oracle::kMost;
        messages.push_back({.numbers = &cases.back(),
                            .count = count,
                            .slice = kChunkElements * (1 + random() % 4),
                            .in_place = random() % 2 == 0,
                            .shift = random() % 3});
      }
    runAll(P, messages);
  }
}

TEST(sizes_at_the_edges_of_chunks_and_slices) {
  for (int P : {2, 3, 5}) {
    const Case half(P, DType::kFloat16, ReduceOp::kAvg),
        scaled(P, DType::kFloat16, ReduceOp::kPremulSum);
    std::vector<Sum> messages;
    for (size_t count : {0, 1, 127, 128, 129, 128 * P, 128 * P + 1, 256 * P - 1, 1000, 4099})
      for (const Case* numbers : {&half, &scaled})
        for (size_t slice :
             {size_t{128}, size_t{384}, std::max<size_t>(ringSlice(count, P, 4), 128)})
          messages.push_back({numbers, count, slice, count % 2 == 0, 0});
    runAll(P, messages);
  }
}

TEST(every_rank_exchanges_as_often_and_peers_mean_the_same_elements) {
  for (int P = 2; P <= 8; ++P)
    for (size_t count : {0, 1, 130, 1000, 4099, 100000}) {
      std::vector<std::vector<RingStep>> wires(static_cast<size_t>(P));
      for (int r = 0; r < P; ++r)
        for (const RingStep& step : ringSteps({r, P, count, 512, true, true}))
          if (isOnWire(step)) wires[static_cast<size_t>(r)].push_back(step);
      for (size_t r = 0; r < wires.size(); ++r) {
        const auto& next = wires[(r + 1) % wires.size()];
        CHECK_EQ(wires[r].size(), next.size());
        for (size_t t = 0; t < next.size(); ++t) {
          CHECK_EQ(wires[r][t].elements.begin, next[t].coming.begin);
          CHECK_EQ(wires[r][t].elements.size, next[t].coming.size);
          if (next[t].coming.size > 0)
            CHECK_EQ(wires[r][t].from.in == In::kSums, next[t].to.in == In::kSums);
        }
      }
    }
}

TEST(events_order_all_that_touches_the_same_memory) {
  for (int P = 2; P <= 8; ++P)
    for (size_t count : {1, 600, 3000, 9000})
      for (bool wide : {false, true})
        for (bool scaled : {false, true})
          for (bool in_place : {false, true})
            for (int r = 0; r < P; r += P - 1) {
              const RingPlan plan{r, P, count, 256, wide && P > 2, scaled};
              CHECK_EQ(hazards({ringSteps(plan), ringSteps(plan)}, plan, in_place), 0u);
            }
}

// Without any of the waits some memory is touched in no order.
TEST(every_kind_of_wait_is_needed) {
  const RingPlan plan{1, 4, 9000, 256, true, true};
  for (Do what : {Do::kAdd, Do::kExchange, Do::kEnd}) {
    Steps steps = ringSteps(plan);
    CHECK_EQ(hazards({steps}, plan, true), 0u);
    size_t changed = 0;
    for (RingStep& step : steps) {
      if (step.what != what || step.waits < 0) continue;
      const int kept = std::exchange(step.waits, -1);
      changed += hazards({steps}, plan, true) > 0;
      step.waits = kept;
    }
    CHECK(changed > 0);
  }
}

TEST(while_a_slice_is_added_another_is_on_the_wire) {
  const RingPlan plan{0, 4, 98304, 1024, true, false};
  const Steps steps = ringSteps(plan);
  // The exchange that an addition waits for is not the latest before it.
  std::vector<int> records;
  size_t additions = 0;
  for (const RingStep& step : steps) {
    if (isOnWire(step)) records.push_back(step.records);
    if (step.what != Do::kAdd) continue;
    ++additions;
    CHECK(records.size() >= kRingWindow);
    CHECK_EQ(step.waits, records[records.size() - kRingWindow]);
    CHECK(step.waits != records.back());
  }
  CHECK(additions > 30);
}

TEST(the_stand_in_sees_what_would_hang_nccl) {
  FakeNccl& nccl = freshNccl();
  nccl.enqueue = nullptr;
  const auto library = NcclLibrary::load(RINGREDUCE_FAKE_NCCL);
  const NcclId id = library->makeId();
  ::ranks::inThreads(2, [&](int r) {
    NcclCommunicator comm(library, id, r, 2);
    char byte[2] = {};
    if (r == 0)
      comm.send(byte, 1, 1, nullptr);
    else
      comm.recv(byte, 2, 0, nullptr);
  });
  CHECK_EQ(std::string(nccl.complaint), "rank 0 sends 1 bytes, and rank 1 receives 2");
}
