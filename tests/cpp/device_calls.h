// Calls of the GPU's kernels by ranks of host threads: the users' tensors, the kernels one after
// the other, and what they must have left in memory.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "check.h"
#include "cuda/kernels/gpu_tuning.h"
#include "cuda/kernels/kernel_table.h"
#include "host_block.h"
#include "reduction_case.h"
#include "transport/shm/page.h"

namespace host {

using oracle::Bytes;

// Where tensors lie, in elements past an aligned address.
enum class Alignment {
  kAligned,
  kShifted,  // all by one
  kByRank,   // each rank's by another number
  kApart,    // a rank's input by one, its output by two
};

struct Call {
  Kind kind = Kind::kAllReduce;
  DeviceAlgorithm algorithm = DeviceAlgorithm::kTwoShot;  // of an all-reduce
  const oracle::Case* numbers;
  size_t count;  // of a part, where there are parts
  int blocks = 1;
  size_t slice = kChunkElements, window = 1;
  bool in_place = false;
  Alignment place = Alignment::kAligned;
  bool device_factor = false;
  int root = 0;
  bool two_hops = false;  // a broadcast in two hops
  // By a kernel of this very number of ranks; and on tensors where they are, an all-reduce by
  // two-shot, a reduce-scatter or an all-gather; or by LL, an all-reduce by one-shot.
  bool fixed = false, located = false, ll = false;
  bool nvls = false;  // in the NVSwitch, cut as two-shot
  // Located: whose inputs (bit 2 r) and outputs (bit 2 r + 1) peers do not map.  As in a
  // communicator, those that are not aligned, and inputs to be scaled, are never mapped, and only
  // tensors that peers touch are.
  uint32_t staged = 0;

  bool canBeFixed() const {
    return fixedSizeOf(numbers->P) >= 0 && !moves() && hasFixedKernels(numbers->dtype) &&
           (numbers->op == ReduceOp::kSum || numbers->op == ReduceOp::kAvg) &&
           algorithm != DeviceAlgorithm::kRing;
  }
  bool canBeNvls() const {
    return kind == Kind::kAllReduce && hasNvlsKernel(numbers->dtype) &&
           (numbers->op == ReduceOp::kSum || numbers->op == ReduceOp::kAvg) &&
           algorithm == DeviceAlgorithm::kTwoShot;
  }
  // Of what is only moved; slices are counted in it.
  int unit() const { return unitOf(numbers->width()); }
  bool moves() const { return kind == Kind::kAllGather || kind == Kind::kBroadcast; }
  bool isInPlace() const { return in_place || kind == Kind::kBroadcast; }
  size_t partBytes() const { return count * numbers->width(); }
  size_t inputParts() const { return kind == Kind::kReduceScatter ? at(numbers->P) : 1; }
  size_t outputParts() const { return kind == Kind::kAllGather ? at(numbers->P) : 1; }
  // Where in the memory of a call in place the input and the output of a rank begin.
  size_t inputBegin(int r) const { return kind == Kind::kAllGather ? at(r) * partBytes() : 0; }
  size_t outputBegin(int r) const { return kind == Kind::kReduceScatter ? at(r) * partBytes() : 0; }

  std::string text() const {
    return std::string(kind == Kind::kAllReduce ? kDeviceAlgorithmNames[static_cast<int>(algorithm)]
                                                : name(kind)) +
           ", " + numbers->text(count) + ", " + std::to_string(blocks) + " blocks, slices of " +
           std::to_string(slice) + (in_place ? ", in place" : "") + (fixed ? ", fixed" : "") +
           (located ? ", located, staged " + std::to_string(staged) : "") + (ll ? ", LL" : "") +
           (nvls ? ", NVLS" : "") + ", place " + std::to_string(static_cast<int>(place));
  }
  Bytes wanted(int rank) const {
    const auto part = [&](const Bytes& of, size_t p) {
      return Bytes(of.data() + p * partBytes(), of.data() + (p + 1) * partBytes());
    };
    switch (kind) {
      case Kind::kReduceScatter:
        return part(numbers->owned[at(rank)], at(rank));
      case Kind::kAllGather: {
        Bytes all;
        for (const Bytes& addends : numbers->addends)
          all.insert(all.end(), addends.data(), addends.data() + partBytes());
        return all;
      }
      case Kind::kBroadcast:
        return part(numbers->addends[at(root)], 0);
      default:
        return nvls ? numbers->inRankOrder(count) : numbers->canonical(count);
    }
  }

 private:
  static size_t at(int i) { return static_cast<size_t>(i); }
};

// Memory of a user, between bytes that nobody may touch.
class Tensor {
 public:
  Tensor(size_t bytes, size_t shift) : shift_(kAround + shift), size_(bytes) {
    memory_.resize(shift_ + bytes + kAround, kUntouched);
  }
  unsigned char* data() { return memory_.data() + shift_; }
  size_t size() const { return size_; }
  Bytes bytes() { return {data(), data() + size_}; }
  bool intactAround() const {
    for (size_t i = 0; i < memory_.size(); ++i)
      if ((i < shift_ || i >= shift_ + size_) && memory_[i] != kUntouched) return false;
    return true;
  }

 private:
  static constexpr size_t kAround = 64;
  static constexpr unsigned char kUntouched = 0xa5;
  const size_t shift_, size_;
  Bytes memory_;
};

// A rank's tensors of a call: the input filled, the output not.
class Tensors {
 public:
  Tensors(const Call& call, int rank) : call_(call), rank_(rank), in_(size(), shift(true)) {
    if (!call.isInPlace()) out_.emplace(call.outputParts() * call.partBytes(), shift(false));
    if (call.kind != Kind::kBroadcast || rank == call.root)
      std::memcpy(input(), addends().data(), call.inputParts() * call.partBytes());
  }

  unsigned char* input() { return in_.data() + (out_ ? 0 : call_.inputBegin(rank_)); }
  unsigned char* output() { return out_ ? out_->data() : in_.data() + call_.outputBegin(rank_); }
  Bytes result() { return {output(), output() + call_.outputParts() * call_.partBytes()}; }
  bool intactAround() const { return in_.intactAround() && (!out_ || out_->intactAround()); }

  // That the output is what it must be, and all else what it was.
  void verify() {
    const Bytes wanted = call_.wanted(rank_);
    if (!call_.moves())
      call_.numbers->expect(result(), wanted, call_.text().c_str());
    else if (result() != wanted)
      check::fail(__FILE__, __LINE__, call_.text() + ", rank " + std::to_string(rank_));
    CHECK(intactAround());
    if (!out_ && call_.kind != Kind::kReduceScatter) return;
    Bytes left = in_.bytes(), before(addends().data(), addends().data() + left.size());
    if (!out_)
      for (Bytes* one : {&left, &before})
        std::fill_n(one->begin() + static_cast<ptrdiff_t>(call_.outputBegin(rank_)), wanted.size(),
                    0);
    CHECK(left == before);
  }

 private:
  size_t size() const {
    const size_t parts =
        call_.isInPlace() ? std::max(call_.inputParts(), call_.outputParts()) : call_.inputParts();
    return parts * call_.partBytes();
  }
  size_t shift(bool input) const {
    const size_t elements = call_.place == Alignment::kShifted  ? 1
                            : call_.place == Alignment::kByRank ? static_cast<size_t>(rank_)
                            : call_.place == Alignment::kApart  ? (input ? 1 : 2)
                                                                : 0;
    return elements * call_.numbers->width();
  }
  const Bytes& addends() const { return call_.numbers->addends[static_cast<size_t>(rank_)]; }

  const Call call_;
  const int rank_;
  Tensor in_;
  std::optional<Tensor> out_;  // none in place
};

// The kernels that a test compiles; each of them takes seconds.
struct Compiled {
  bool one_shot = true, two_shot = true, ring = true, moves = true, fixed = true, located = true;
  bool nvls = true;
};

// One kernel of the call, by `Rules`; E is one of `dtypes`.
template <class Rules, Compiled compiled, DType... dtypes, class B>
void runKernel(B& block, const Call& call, RankCall rank_call, const Location& location,
               const Window& window, int channel) {
  if (channel >= call.blocks) return;
  if (call.moves()) {
    const auto move = [&]<int unit>() {
      constexpr bool kNeeded = ((unitOf(sizeOf(dtypes)) == unit) || ...);
      if constexpr (compiled.moves && kNeeded)
        if (call.unit() == unit) {
          if constexpr (compiled.located)
            if (call.located)
              return locatedGatherBlock<unitBytes(unit), Rules>(
                  block, *rank_call.comm, rank_call, location, block.peers(), channel, call.blocks);
          gatherBlock<unitBytes(unit), Rules>(block, rank_call, channel, call.blocks);
        }
    };
    move.template operator()<0>();
    move.template operator()<1>();
    return move.template operator()<2>();
  }
  const DeviceComm& comm = *rank_call.comm;
  const auto with = [&]<DType dtype, int P>() {
    using E = Element<dtype>;
    using enum DeviceAlgorithm;
    readFactor<E>(rank_call);
    if constexpr (compiled.located)
      if (call.located)
        return locatedBlock<E, Rules, P>(block, comm, rank_call, location, block.peers(), channel,
                                         call.blocks);
    if constexpr (compiled.nvls && P == 0 && hasNvlsKernel(dtype))
      if (call.nvls)
        return nvlsBlock<E, Rules>(block, comm, rank_call, window, channel, call.blocks);
    if constexpr (compiled.one_shot && P > 0)
      if (call.ll) return llBlock<E, Rules, P>(block, comm, rank_call, channel, call.blocks);
    if constexpr (compiled.one_shot && hasKernel(kOneShot, dtype))
      if (call.algorithm == kOneShot)
        allReduceBlock<kOneShot, E, Rules, P>(block, comm, rank_call, channel, call.blocks);
    if constexpr (compiled.two_shot)
      if (call.algorithm == kTwoShot)
        allReduceBlock<kTwoShot, E, Rules, P>(block, comm, rank_call, channel, call.blocks);
    if constexpr (compiled.ring && P == 0 && hasKernel(kRing, dtype))
      if (call.algorithm == kRing)
        allReduceBlock<kRing, E, Rules>(block, comm, rank_call, channel, call.blocks);
  };
  const auto of_type = [&]<DType dtype>() {
    if constexpr (compiled.fixed && hasFixedKernels(dtype))
      if (call.fixed) switch (comm.size) {
          case 2:
            return with.template operator()<dtype, 2>();
          case 4:
            return with.template operator()<dtype, 4>();
          case 8:
            return with.template operator()<dtype, 8>();
        }
    with.template operator()<dtype, 0>();
  };
  (void)((dtypes == call.numbers->dtype && (of_type.template operator()<dtypes>(), true)) || ...);
}

// Calls of all ranks in the same order, as kernels in each rank's stream.
class Calls {
 public:
  explicit Calls(Ranks& ranks, uint64_t timeout = 60'000'000'000)
      : ranks_(ranks), timeout_(timeout) {}

  void add(const Call& call) {
    Entry& entry = calls_.emplace_back(call);
    const oracle::Case& numbers = *call.numbers;
    for (int r = 0; r < numbers.P; ++r) {
      Tensors& tensors = entry.tensors.emplace_back(call, r);
      const double factor = oracle::factorOf(r);
      entry.factors.push_back({factor, static_cast<float>(factor)});
      const Entry::Factor& lying = entry.factors.back();
      entry.ranks.push_back(
          {.comm = &ranks_.comm(r),
           .input = tensors.input(),
           .output = tensors.output(),
           .count = call.moves() ? call.partBytes() / unitBytes(call.unit()) : call.count,
           .arithmetic = {.combine = combineOf(numbers.dtype, numbers.op),
                          .divide = numbers.op == ReduceOp::kAvg,
                          .scale = numbers.op == ReduceOp::kPremulSum,
                          .world_size = numbers.P,
                          .factor = call.device_factor ? 1e9 : factor},
           .factor = !call.device_factor                ? nullptr
                     : numbers.dtype == DType::kFloat64 ? static_cast<const void*>(&lying.wide)
                                                        : &lying.narrow,
           .timeout = timeout_,
           .operation = calls_.size(),
           .slice = call.ll ? onlySlice(call) : call.slice,
           .window = call.window,
           .scatter = call.kind == Kind::kReduceScatter || call.two_hops,
           .poison = poisonOf(numbers.dtype),
           .root = call.kind == Kind::kBroadcast ? call.root : kEverybody});
      Location& location = entry.locations.emplace_back();
      location.what = calls_.size();
      if (!call.located) continue;
      const auto place = [&](unsigned char* data, size_t parts, int bit) -> Place {
        const bool is_aligned = reinterpret_cast<uintptr_t>(data) % sizeof(Pack) == 0;
        const bool is_scaled = bit == 0 && numbers.op == ReduceOp::kPremulSum;
        if (!is_aligned || is_scaled || (call.staged >> (2 * r + bit) & 1) != 0) return {};
        return ranks_.mapped(r, reinterpret_cast<std::byte*>(data), parts * call.partBytes());
      };
      if (call.kind != Kind::kAllGather) location.in = place(tensors.input(), call.inputParts(), 0);
      if (call.kind != Kind::kReduceScatter)
        location.out = place(tensors.output(), call.outputParts(), 1);
    }
  }

  // Where each block has one slice of the message.
  static size_t onlySlice(const Call& call) {
    return roundUp(ceilDiv(call.count, static_cast<size_t>(call.blocks)), kChunkElements);
  }
  size_t count() const { return calls_.size(); }
  const Call& call(size_t kernel) const { return calls_[kernel].call; }
  RankCall& rankCall(size_t kernel, int rank) {
    return calls_[kernel].ranks[static_cast<size_t>(rank)];
  }
  Location& location(size_t kernel, int rank) {
    return calls_[kernel].locations[static_cast<size_t>(rank)];
  }
  Tensors& tensors(size_t kernel, int rank) {
    return calls_[kernel].tensors[static_cast<size_t>(rank)];
  }

  // Kernel `kernel` at one lane of a block.
  template <class Rules, Compiled compiled, DType... dtypes, class B>
  void at(B& block, int rank, int channel, size_t kernel) {
    runKernel<Rules, compiled, dtypes...>(block, calls_[kernel].call, rankCall(kernel, rank),
                                          location(kernel, rank), ranks_.window(rank), channel);
  }

  // That nobody gave up, and all outputs hold what they must and nothing else was written.
  void verify() {
    for (int r = 0; r < ranks_.layout().ranks; ++r) {
      const Trouble& trouble = ranks_.trouble(r);
      if (trouble.cause != static_cast<uint64_t>(Cause::kNone))
        check::fail(__FILE__, __LINE__,
                    "rank " + std::to_string(r) + " gave up on rank " +
                        std::to_string(trouble.peer) + " (cause " + std::to_string(trouble.cause) +
                        ") in call " + std::to_string(trouble.operation) + ": " +
                        calls_[trouble.operation - 1].call.text());
      CHECK_EQ(ranks_.comm(r).local->found_inf, 0.f);
    }
    for (Entry& entry : calls_)
      for (Tensors& tensors : entry.tensors) tensors.verify();
  }

 private:
  struct Entry {
    explicit Entry(const Call& call) : call(call) {}
    struct Factor {
      double wide;
      float narrow;
    };
    Call call;
    std::deque<Tensors> tensors;  // by rank
    std::deque<Factor> factors;   // as they lie in device memory
    std::vector<RankCall> ranks;
    std::vector<Location> locations;
  };

  Ranks& ranks_;
  const uint64_t timeout_;
  std::deque<Entry> calls_;
};

}  // namespace host
