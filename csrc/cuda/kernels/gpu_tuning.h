// The numbers of the GPU layer, and the cost model behind them: blocks, threads, slots, window, and
// the choice of the algorithm.
//
// Model.  K is the time of a kernel besides, H the cost of a hop (until a peer has seen a flag), B
// the bytes a second that a rank can send to all its peers together, S the message, P the ranks.
// To each, K is added:
//
//     one-shot   H + (P-1) S / B                  every byte goes to every rank
//     two-shot   2 H + 2 (P-1)/P S / B            every byte goes twice, two hops for any P
//     ring       2 (P-1) H + 2 (P-1)/P S / B      every byte goes as often, to one neighbour only
//     located    2 H + 2 (P-1)/P S / B            as two-shot, without copies of mapped tensors
//
// LL (ll.h) is one-shot with twice the bytes and a smaller H, since no flag waits until the data
// have arrived: it costs (P-1) S / B more, and is for the smallest messages.
//
// So one-shot beats two-shot while S < H B P / ((P-1) (P-2)), and always for two ranks while S is
// less than the gain of two-shot's pipelining.  With H = 3 us and B = 260 GB/s, an NVLink switch of
// the H100's generation, that is 1.2 MB for 3 ranks, 520 kB for 4 and 150 kB for 8; the push slots
// set a limit too.  Two-shot needs a wire between every two ranks, as an NVLink switch and a single
// GPU have; there it takes all that is longer.  A ring needs P wires, and its slices are longer,
// which matters for large messages over PCIe and host memory.
//
// Integers and truth values have no kernels but two-shot's (kernel_table.h), which takes all sizes.
//
// Reduce-scatter and all-gather go by push: one hop, and (P-1)/P S sent of S in all parts, as
// little as by a ring's P-1 hops.  On tensors where they are they take two hops and send as much,
// but move 2 (P-1)/P S less through each GPU's own memory.  With 3 TB/s that is worth a hop from S
// = 9 MB on for 2 ranks, and 5 MB for 8: arithmetic, not measured.  A broadcast in one hop costs H
// + (P-1) S / B, and in two hops as much as two-shot (push_gather.h): the same size decides, and
// two ranks always take one hop.
//
// Where ranks share one GPU, and all their kernels can run at once (one process, or MPS), a hop
// costs 2 to 5 us (2 to 8 ranks) and B is the memory's: bytes as each algorithm's header counts
// them. Where they cannot, only the direct schedule works (direct_schedule.h).
//
// K, H and B fit what others measured on H100s with an NVLink switch.  One-shot of 6 ranks takes 13
// us for 0.5 MiB and 70 us for 4 MiB (vLLM's pull request 24111): K + H = 5 us, B = 320 GB/s.
// Two-shot of 8 ranks takes 37 us for 4 MiB and 468 us for 64 MiB (its 42324): K + 2 H = 8 us, B =
// 255 GB/s.  So K = 2 us.  This code was measured with ranks that share one H200: the limits are
// near the right ones there, but two-shot beats the ring at every size (docs/gpu.md).
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "base/bytes.h"
#include "cuda/kernels/collective_kernel.h"
#include "cuda/kernels/device_layout.h"

namespace ringreduce::cuda {

// Threads of a block.  8 warps with eight packs of 16 bytes each in flight make 32 KiB a block,
// somewhat more than memory of 4.8 TB/s and 700 ns over 132 multiprocessors asks for (26 KiB). With
// the 128 registers that these loops take (with 64 they spill), two blocks fit a multiprocessor.
inline constexpr int kThreads = 256;

// Ranks that one launch can run, for several ranks in one process.
inline constexpr int kMostRanksOfLaunch = 16;

// The properties that the numbers depend on.
struct Setting {
  int ranks = 2;
  int multiprocessors = 132;
  int ranks_on_device = 1;  // that share the busiest GPU
  bool on_one_gpu = false;  // all ranks of the group are
  // Kernels of all ranks may wait for each other: those that share a GPU are of one process or of
  // MPS, and no GPU ends kernels that run for long.
  bool run_at_once = true;
  bool all_to_all = true;  // peers reach each other's memory (not by way of the host's)
  bool linked = true;      // and do so by NVLink, or in the same GPU
};

struct Tuning {
  int channels;          // blocks a rank
  size_t slot_bytes;     // ring
  uint64_t depth;        // ring slots a channel
  size_t window;         // ring slices under way
  size_t part_bytes;     // push slots
  size_t one_shot_most;  // bytes of a message that still takes one-shot
  size_t two_shot_most;  // and two-shot
  size_t ll_bytes;       // LL slots
  size_t ll_most;        // bytes of a message that goes by LL
  size_t window_bytes;   // for tensors that peers cannot reach (located.h)
  size_t located_least;  // bytes from which on tensors are used where they are
  size_t parts_located;  // the same of calls with parts, of all of them
  size_t shared_lead;    // direct schedule: from here on every rank leads a part

  constexpr DeviceLayout layout(int ranks) const {
    return {.ranks = ranks,
            .channels = channels,
            .slot_bytes = slot_bytes,
            .depth = depth,
            .part_bytes = part_bytes,
            .ll_bytes = ll_bytes,
            .window_bytes = window_bytes};
  }
};

// Memory that peers write to, a rank: this much for ring slots and this much for push slots.
inline constexpr size_t kRingBudget = size_t{16} << 20;
inline constexpr size_t kPushBudget = size_t{64} << 20;
// And this much for its own tensors, where peers cannot reach them: a longer message costs two hops
// for each of it.
inline constexpr size_t kWindowBytes = size_t{32} << 20;

// Each half of the staging memory of a rank that takes the direct schedule.  Longer messages go in
// pieces of this.
inline constexpr size_t kStagingBytes = size_t{32} << 20;

// The longest message that may go by LL.
inline constexpr size_t kLLMost = size_t{64} << 10;

// Blocks of a kernel that only moves bytes and waits for no other rank: it may fill a GPU.
constexpr int blocksToMove(size_t bytes, int multiprocessors) {
  constexpr size_t kEach = size_t{kThreads} * 8 * sizeof(Pack);
  return static_cast<int>(
      std::clamp<size_t>(ceilDiv(bytes, kEach), 1, 2 * static_cast<size_t>(multiprocessors)));
}

constexpr Tuning tune(const Setting& s) {
  const auto ranks = static_cast<size_t>(s.ranks);
  // 32 blocks saturate NVLink.  A kernel waits for its peers, so all its blocks must fit beside
  // those of other groups: two fit a multiprocessor (kernels.cuh), so eight groups with a quarter
  // of them do.  Ranks that share a GPU share half of its multiprocessors.
  const int share = s.ranks_on_device > 1 ? s.multiprocessors / (2 * s.ranks_on_device)
                                          : std::min(32, s.multiprocessors / 4);
  const int channels = std::clamp(share, 1, kMostChannels);
  const auto c = static_cast<size_t>(channels);
  constexpr uint64_t kDepth = 4;
  // Powers of two within the budget; slots beyond 256 KiB only delay the next hop.  A part of 32
  // KiB gives each thread of a block eight packs, so that it has eight in flight.
  const size_t slot = std::bit_floor(kRingBudget / (c * kDepth));
  const size_t part = std::bit_floor(kPushBudget / (c * 2 * kPushSets * ranks));
  const size_t slot_bytes = std::clamp<size_t>(slot, 4 << 10, 256 << 10);
  const size_t part_bytes = std::clamp<size_t>(part, 1 << 10, 64 << 10);
  constexpr size_t kHopBytes = 780'000;  // H B
  const size_t even = s.ranks <= 2 ? 1 << 20 : kHopBytes * ranks / ((ranks - 1) * (ranks - 2));
  // Half of H is taken for what LL saves.  Without NVLink a byte costs ten times as much, and a
  // look at a word that has not come may cross PCIe.
  const size_t gain = ranks < 2 ? 0 : kHopBytes / 2 / ((s.linked ? 1 : 10) * (ranks - 1));
  // A thread has one piece of 8 bytes.
  const size_t ll_most = s.all_to_all ? std::min({kLLMost, gain, c * size_t{kThreads} * 8}) : 0;
  // More steps than two, and a ring's or two-shot's pipeline is the better one.
  const size_t one_shot_most = std::min(even, 2 * c * part_bytes);
  return {.channels = channels,
          .slot_bytes = slot_bytes,
          .depth = kDepth,
          .window = 1,
          .part_bytes = part_bytes,
          .one_shot_most = one_shot_most,
          .two_shot_most = !s.all_to_all ? size_t{1} << 20
                           : s.linked    ? SIZE_MAX
                                         : size_t{64} << 20,
          // A channel's share of the longest message, with a flag beside each four bytes.
          .ll_bytes = 2 * roundUp(ceilDiv(kLLMost, c), kChunkElements * sizeof(float)),
          .ll_most = ll_most,
          .window_bytes = ranks > 1 && s.run_at_once ? kWindowBytes : 0,
          // Below, one-shot or a copy in the caches costs less than a read over a link.  Where GPUs
          // are not linked, reads take longer than writes.
          .located_least = s.run_at_once && s.all_to_all && s.linked
                               ? std::max(one_shot_most, size_t{256} << 10)
                               : SIZE_MAX,
          .parts_located = s.run_at_once && s.all_to_all && s.linked ? size_t{8} << 20 : SIZE_MAX,
          // Where ranks take turns on one GPU, a part for each would cost a turn for each.
          .shared_lead = s.on_one_gpu && !s.run_at_once ? SIZE_MAX : size_t{1} << 20};
}

constexpr DeviceAlgorithm chooseKernel(const Tuning& t, size_t bytes) {
  if (bytes <= t.one_shot_most) return DeviceAlgorithm::kOneShot;
  return bytes <= t.two_shot_most ? DeviceAlgorithm::kTwoShot : DeviceAlgorithm::kRing;
}

// Elements of a slice (ring) or a part (push): as many as fit a slot, and fewer in small messages,
// so that every channel has some.  A multiple of the canonical 128 elements.
constexpr size_t sliceOf(const Tuning& t, DeviceAlgorithm algorithm, size_t count, int ranks,
                         size_t stored_bytes, size_t value_bytes) {
  const auto p = static_cast<size_t>(ranks), c = static_cast<size_t>(t.channels);
  const bool ring = algorithm == DeviceAlgorithm::kRing;
  const size_t widest = ring ? std::max(stored_bytes, value_bytes) : stored_bytes;
  const size_t fits =
      (ring ? t.slot_bytes : t.part_bytes) / widest / kChunkElements * kChunkElements;
  const size_t shared_out = algorithm == DeviceAlgorithm::kOneShot ? count : ceilDiv(count, p);
  return std::clamp(roundUp(ceilDiv(shared_out, c), kChunkElements), kChunkElements, fits);
}

// Blocks that have something to do.
constexpr int channelsOf(const Tuning& t, DeviceAlgorithm algorithm, size_t count, int ranks,
                         size_t slice) {
  const auto p = static_cast<size_t>(ranks);
  const size_t each = algorithm == DeviceAlgorithm::kOneShot ? slice : slice * p;
  const size_t of = algorithm == DeviceAlgorithm::kRing
                        ? ceilDiv(Cut{count, ranks}.chunkSize(), slice)
                        : ceilDiv(count, each);
  return static_cast<int>(std::clamp<size_t>(of, 1, static_cast<size_t>(t.channels)));
}

// The elements of a block's piece, and the blocks, of a call in which each block has one piece.
struct PartShape {
  size_t slice;
  int channels;
};
constexpr PartShape llShapeOf(const Tuning& t, size_t count) {
  const size_t slice = roundUp(ceilDiv(count, static_cast<size_t>(t.channels)), kChunkElements);
  return {slice, static_cast<int>(ceilDiv(count, slice))};
}

// The elements of a chunk, or of a rank's part, that a block has in a turn (located.h), of so many
// bytes each.  The window has room for a turn's of all chunks.
constexpr PartShape locatedPartShapeOf(const Tuning& t, size_t chunk, int ranks, size_t width) {
  const auto c = static_cast<size_t>(t.channels);
  const size_t fits = t.window_bytes / (c * static_cast<size_t>(ranks) * width);
  const size_t slice = std::clamp(roundUp(ceilDiv(chunk, c), kChunkElements), kChunkElements,
                                  fits / kChunkElements * kChunkElements);
  return {slice, static_cast<int>(std::clamp<size_t>(ceilDiv(chunk, slice), 1, c))};
}
constexpr PartShape locatedShapeOf(const Tuning& t, size_t count, int ranks, size_t width) {
  return locatedPartShapeOf(t, Cut{count, ranks}.chunkSize(), ranks, width);
}

// The pushes of a call other than all-reduce, with parts (a broadcast: a message) of `count`
// elements of so many bytes.  They are pushed as one-shot pushes a message.
constexpr PartShape partShapeOf(const Tuning& t, size_t count, int ranks, size_t bytes,
                                bool two_hops = false) {
  const auto as = two_hops ? DeviceAlgorithm::kTwoShot : DeviceAlgorithm::kOneShot;
  const size_t slice = sliceOf(t, as, count, ranks, bytes, bytes);
  return {slice, channelsOf(t, as, count, ranks, slice)};
}

// Whether a broadcast of so many bytes goes in two hops.
constexpr bool takesTwoHops(const Tuning& t, size_t bytes, int ranks) {
  return ranks > 2 && bytes > t.one_shot_most;
}

// Elements of `width` bytes are moved in units of 1, 2 or 4 bytes where pointers are not aligned to
// 16 bytes.  The unit depends on the width alone, so all ranks choose the same.
inline constexpr int kUnits = 3;
constexpr int unitOf(size_t width) {
  return width % 4 == 0 ? 2 : width % 2 == 0 ? 1 : 0;
}
constexpr size_t unitBytes(int unit) {
  return size_t{1} << unit;
}

}  // namespace ringreduce::cuda
