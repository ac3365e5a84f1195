// All-reduce in the NVSwitch (NCCL's NVLS).
//
// A window is memory of every rank that a multicast object binds together (memory/multicast.h).  A
// load at its multicast address gets the sum of what all ranks have there, which the switch adds on
// the way; a store goes to all of them.
//
// A tile of the message has a part for each rank.  Each rank copies its tile to its window, loads
// the sums of its part, stores them to all, and copies the tile out.  Flags are exchanged twice:
// before the loads, so that all tiles are complete, and after the stores.  Once a rank has the
// second flags of all peers, no peer reads its window any more, and it may copy the next tile in.
// Each block has a place of its own in the window.  A kernel ends when all of its blocks have those
// flags, so the next call may share the window out in another way.
//
// Ordinary addresses and multicast ones are aliases of the same memory.  PTX orders accesses by
// both only where fence.proxy.alias lies between them (8.6): each thread has one after its copies,
// and one after its stores, before the barrier and the flag.
//
// Failure.  A rank that gives up tells its peers that it has left, as in located.h, and its kernel
// ends when none of them can be at work in its window, or after kFarewell (guard.h): the window is
// given back with the communicator.
//
// Price: one rank gets each sum, so all ranks have the same bits.  But the switch adds in an order
// and with a rounding of its own.  They are not the CPU's, and NVIDIA does not promise that they
// are those of the next run.  Sums of halves are rounded before AVG divides them, so sums of
// float16 above 65504 are infinite.
//
// Bytes: over a GPU's links (1 + 1/P) S in each direction; through its memory 6 S, of which 4 S are
// the copies.
#pragma once

#include <bit>

#include "cuda/kernels/gpu_tuning.h"
#include "cuda/kernels/push.h"
#include "cuda/kernels/ring_kernel.h"

namespace ringreduce::cuda {

// What the switch adds that gradients are.  SUM only, and AVG by a division after it.
constexpr bool hasNvlsKernel(DType dtype) {
  return dtype == DType::kFloat32 || isHalf(dtype);
}

// Memory that the switch adds: this rank's own, and the address that stands for the same place in
// all ranks' memory, which only multimem instructions may use.
struct Window {
  std::byte *own, *everyone;
};

// Its size: one step for DDP's buckets of 25 MiB, and a part of 128 KiB for each of 32 blocks and 8
// ranks.
inline constexpr size_t kNvlsWindow = size_t{32} << 20;

// The slice is a rank's part of what a block has in the window at once.
constexpr PartShape nvlsShapeOf(const Tuning& t, size_t count, int ranks, size_t width) {
  Tuning of = t;
  of.part_bytes = std::bit_floor(kNvlsWindow / static_cast<size_t>(t.channels * ranks));
  const size_t slice = sliceOf(of, DeviceAlgorithm::kTwoShot, count, ranks, width, width);
  return {slice, channelsOf(t, DeviceAlgorithm::kTwoShot, count, ranks, slice)};
}

struct NvlsLaunch {
  DeviceComm comm;
  RankCall call;
  Window window;
};
const void* nvlsKernel(DType dtype);  // of hasNvlsKernel; takes an NvlsLaunch

#ifdef __CUDACC__

// A block (thread_block.h) with what a switch does.  GPUs before sm_90 know no such addresses, and
// no kernel with them is launched there.
struct SwitchBlock : DeviceBlock<kThreads> {
  // The packs of all ranks at a multicast address, added.
  template <DType dtype>
  __device__ Pack loadSum(const Pack* from) const {
    Pack sum{};
    uint32_t (&w)[4] = sum.words;
#if __CUDA_ARCH__ >= 900
#define RINGREDUCE_LOAD_SUM(type)                                                   \
  asm volatile("multimem.ld_reduce.relaxed.sys.add" type " {%0, %1, %2, %3}, [%4];" \
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])                     \
               : "l"(from)                                                          \
               : "memory")
    if constexpr (dtype == DType::kFloat32) RINGREDUCE_LOAD_SUM(".v4.f32");
    if constexpr (dtype == DType::kFloat16) RINGREDUCE_LOAD_SUM(".acc::f32.v4.f16x2");
    if constexpr (dtype == DType::kBFloat16) RINGREDUCE_LOAD_SUM(".acc::f32.v4.bf16x2");
#undef RINGREDUCE_LOAD_SUM
#else
    (void)from, (void)w;
    __trap();
#endif
    return sum;
  }
  // Stores to all ranks.
  __device__ void storeAll(Pack* to, Pack value) const {
#if __CUDA_ARCH__ >= 900
    asm volatile("multimem.st.relaxed.sys.v4.f32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(to), "r"(value.words[0]), "r"(value.words[1]), "r"(value.words[2]),
                   "r"(value.words[3])
                 : "memory");
#else
    (void)to, (void)value;
    __trap();
#endif
  }
  // What this thread knows of stores by one kind of address holds for loads by the other.
  __device__ void fenceAliases() const { asm volatile("fence.proxy.alias;" ::: "memory"); }
};

#endif

template <class E, class Rules, class Block>
class Nvls {
 public:
  RINGREDUCE_DEVICE Nvls(Block& block, Guard<Block>& guard, const DeviceComm& comm,
                         const RankCall& call, const Window& window, int channel, int channels)
      : block_(block),
        guard_(guard),
        comm_(comm),
        call_(call),
        channel_(static_cast<size_t>(channel)),
        channels_(static_cast<size_t>(channels)),
        exchange_(block, guard, comm, channel),
        tile_(call.slice * static_cast<size_t>(comm.size)),
        own_(window.own + channel_ * tile_ * kWidth),
        everyone_(window.everyone + channel_ * tile_ * kWidth) {}

  RINGREDUCE_DEVICE void run() {
    const size_t tiles = slicesOf(static_cast<int>(channel_), static_cast<int>(channels_),
                                  ceilDiv(call_.count, tile_));
    if (tiles == 0 || guard_.failed()) return;
    const auto* input = static_cast<const std::byte*>(call_.input);
    auto* output = static_cast<std::byte*>(call_.output);
    const uint64_t parts = exchange_.first(kParts), results = exchange_.first(kResults);
    size_t j = 0;
    for (; j < tiles && !guard_.failed(); ++j) {
      const Span tile = piece(call_.count, tile_, j * channels_ + channel_);
      if (j > 0) block_.sync();  // all threads have copied the last tile out
      copyElements<E>(block_, tile.size, input + tile.begin * kWidth, Spans<1>{{own_}});
      if (!meet(kParts, parts + j)) break;
      add(tile.size);
      if (!meet(kResults, results + j)) break;
      copyElements<E>(block_, tile.size, own_, Spans<1>{{output + tile.begin * kWidth}});
    }
    if (guard_.failed()) {
      block_.fenceAliases();
      return exchange_.depart(parts + j, results + j);
    }
    exchange_.save(kParts, parts + tiles);
    exchange_.save(kResults, results + tiles);
  }

 private:
  using Exchange = PushExchange<Rules, Block>;
  using Value = typename E::Value;
  static constexpr auto kParts = DeviceLayout::Of::kParts;
  static constexpr auto kResults = DeviceLayout::Of::kResults;
  static constexpr size_t kWidth = sizeof(typename E::Stored);
  static constexpr size_t kPer = sizeof(Pack) / kWidth;
  static constexpr int kPacks = 8;  // of a thread, in flight

  RINGREDUCE_DEVICE bool meet(DeviceLayout::Of what, uint64_t step) {
    block_.fenceAliases();
    exchange_.post(what, step);
    return exchange_.await(what, step, [](int) { return Cause::kNone; });
  }

  // Adds this rank's part of a tile, by whole packs: there is room behind the last element.
  RINGREDUCE_DEVICE void add(size_t size) {
    const size_t each = size == tile_ ? call_.slice : Cut{size, comm_.size}.chunkSize();
    const Span mine = piece(size, each, static_cast<size_t>(comm_.rank));
    auto* at = reinterpret_cast<Pack*>(everyone_ + mine.begin * kWidth);
    const size_t packs = ceilDiv(mine.size, kPer), threads = static_cast<size_t>(block_.threads());
    for (size_t i = static_cast<size_t>(block_.thread()); i < packs; i += threads * kPacks) {
      Pack sums[kPacks];
      const auto each_pack = [&](auto visit) {
        RINGREDUCE_UNROLL for (int u = 0; u < kPacks; ++u) {
          const size_t k = i + static_cast<size_t>(u) * threads;
          if (k < packs) visit(at + k, sums[u]);
        }
      };
      each_pack([&](Pack* from, Pack& sum) { sum = block_.template loadSum<E::kDType>(from); });
      each_pack([&](Pack* to, Pack& sum) {
        if (call_.arithmetic.divide) divide(sum);
        block_.storeAll(to, sum);
      });
    }
  }

  RINGREDUCE_DEVICE void divide(Pack& sum) const {
    typename E::Stored elements[kPer];
    std::memcpy(elements, &sum, sizeof sum);
    const Divider<E> divided(comm_.size);
    RINGREDUCE_UNROLL for (size_t v = 0; v < kPer; ++v) elements[v] =
        E::narrow(divided(E::widen(elements[v])));
    std::memcpy(&sum, elements, sizeof sum);
  }

  Block& block_;
  Guard<Block>& guard_;
  const DeviceComm& comm_;
  const RankCall& call_;
  const size_t channel_, channels_;
  const Exchange exchange_;
  const size_t tile_;
  std::byte *const own_, *const everyone_;
};

template <class E, class Rules, class Block>
RINGREDUCE_DEVICE void nvlsBlock(Block& block, const DeviceComm& comm, const RankCall& call,
                                 const Window& window, int channel, int channels) {
  Guard<Block> guard(block, comm, call, channel);
  Nvls<E, Rules, Block>(block, guard, comm, call, window, channel, channels).run();
  guard.leave(channels, call.output, call.count * sizeof(typename E::Stored));
}

}  // namespace ringreduce::cuda
