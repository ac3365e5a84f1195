// Kernels that wait for nothing, because their stream has waited: those of the direct schedule
// (direct_schedule.h) and the addition of the ring between hosts.
//
// In the direct schedule a leader reads some elements of all ranks' memory, adds them in the
// canonical order, and writes the sums to all ranks, or, in a reduce-scatter, to its own output. In
// calls that only move elements it carries them.
//
// Bytes through device memory, all ranks on one GPU: 2 S a rank for an all-reduce, the least
// possible, and 4 S more with copies in and out.  The others have no copies out: for S in all parts
// (3 + 1/P) S for a reduce-scatter, (2 + 2/P) S for an all-gather, 2 S for a broadcast.
#pragma once

#include <cstddef>

#include "algorithm/cut.h"
#include "cuda/kernels/device_layout.h"
#include "cuda/kernels/direct_schedule.h"
#include "cuda/kernels/guard.h"
#include "cuda/kernels/kernel_call.h"
#include "cuda/kernels/ordering.h"
#include "cuda/kernels/place.h"
#include "cuda/kernels/reduce_n.h"

namespace ringreduce::cuda {

struct DirectCall {
  int size;
  int sinks;               // outputs: as many as ranks, or the leader's own; at most `size`
  size_t chunk;            // elements of a chunk of the whole message (algorithm/cut.h)
  size_t begin, elements;  // the part that this leader adds
  size_t first;            // the element at which inputs and outputs begin
  PeerTensors tensors;     // each rank's, mapped here; outputs may be the inputs
  Arithmetic arithmetic;   // scaled already: `scale` is not looked at
  AbortFlag* abort;        // once it is set, nothing is written any more
  const PeerTensors* found = nullptr;  // in device memory: replaces `tensors` (look)
};

// All ranks' inputs for a chunk, first to last.
template <class Block>
struct MappedAddends {
  Block& block;
  const PeerTensors& peers;
  int size;
  size_t offset;
  int chunk;
  int own = -1;
  static constexpr int kCount = 0;
  RINGREDUCE_DEVICE int count() const { return size; }
  RINGREDUCE_DEVICE const std::byte* operator()(int k) const {
    return block.see(peers.input[kthToAdd(chunk, k, size)]) + offset;
  }
};

template <class Block>
struct MappedOutputs {
  Block& block;
  const PeerTensors& peers;
  int sinks;
  size_t offset;
  static constexpr int kCount = 0;
  RINGREDUCE_DEVICE int count() const { return sinks; }
  RINGREDUCE_DEVICE std::byte* operator()(int r) const {
    return block.see(peers.output[r]) + offset;
  }
};

// `peers` is in the block's shared memory.
template <class E, class Block>
RINGREDUCE_DEVICE void direct(Block& block, const DirectCall& call, PeerTensors& peers, int channel,
                              int channels) {
  using Stored = AsStored<E>;
  constexpr size_t kWidth = sizeof(typename E::Stored);
  const PeerTensors& tensors = call.found ? *call.found : call.tensors;
  for (int r = block.thread(); r < call.size; r += block.threads()) {
    block.show(peers.input[r], tensors.input[r]);
    block.show(peers.output[r], tensors.output[r]);
  }
  if (block.any(block.thread() == 0 && (!tensors.input[0] || call.abort->isSet(channel)))) return;
  const size_t each =
      roundUp(ceilDiv(call.elements, static_cast<size_t>(channels)), kChunkElements);
  Span mine = piece(call.elements, each, static_cast<size_t>(channel));
  mine.begin += call.begin;
  forEachPiece(mine, call.chunk, [&](int chunk, size_t begin, size_t size) {
    const size_t offset = (begin - call.first) * kWidth;
    Pass<E, Stored, Stored, Stored>::run(
        block, size, MappedAddends<Block>{block, peers, call.size, offset, chunk},
        MappedOutputs<Block>{block, peers, call.sinks, offset}, call.arithmetic, true);
  });
}

// Finds where all ranks' tensors of a piece are, for the leader's kernel that follows.  One block
// does it, since a GPU fetches a line of host memory for one block at a time.
struct LookCall {
  int rank, size;
  StreamWord* ready;                 // in the leader's page: by owner
  const Location* told[kMostRanks];  // each rank's list
  std::byte* half[kMostRanks];       // each rank's, mapped here
  const std::byte* input;  // the leader's own, where the message begins; null: in its half
  std::byte* output;
  size_t bytes, begin;           // of the message; where the piece begins in it
  uint64_t what;                 // Location's
  SegmentEntry* table;           // DeviceComm's; may be null
  PeerTensors* found;            // in device memory
  AbortFlag* abort[kMostRanks];  // each rank's
  Local* local;
  Trouble* trouble;
  uint64_t operation;  // its number in the group
};

template <class Rules, class Block>
class Look {
 public:
  RINGREDUCE_DEVICE Look(Block& block, const LookCall& call) : block_(block), call_(call) {}

  RINGREDUCE_DEVICE void run() {
    bool skips = false;
    for (int r = block_.thread(); r < call_.size; r += block_.threads()) {
      const std::byte* input = nullptr;
      std::byte* output = nullptr;
      switch (find(r, input, output)) {
        case Cause::kNone:
          call_.found->input[r] = input;
          call_.found->output[r] = output;
          break;
        case Cause::kMismatch:
          report(r);
          [[fallthrough]];
        default:
          skips = true;
      }
    }
    // What the leader's kernel looks at first.
    if (block_.any(skips) && block_.thread() == 0) call_.found->input[0] = nullptr;
  }

 private:
  RINGREDUCE_DEVICE Cause find(int r, const std::byte*& input, std::byte*& output) const {
    input = output = call_.half[r];
    if (r == call_.rank) {
      if (call_.input) input = call_.input + call_.begin;
      if (call_.output) output = call_.output + call_.begin;
      return Cause::kNone;
    }
    const uint32_t word = observeStreamWord(call_.ready[r].word);
    if (word == kInHalf) return Cause::kNone;
    const uint32_t place = word - kInHalf - 1;
    if (place >= kMostTold) return Cause::kAborted;  // kReleased, or what a stream did after that
    const Location& theirs = call_.told[r][place];
    if (Rules::template hear<Rules>(theirs.what) != call_.what) return Cause::kMismatch;
    const auto pick = [&](const Place& told, auto& at) {
      const Place where{Rules::template hear<Rules>(told.segment),
                        Rules::template hear<Rules>(told.offset)};
      if (where.segment == 0) return true;
      at = tensorAt<Rules>(call_.table, r, where, call_.bytes);
      if (at) at += call_.begin;
      return at != nullptr;
    };
    return pick(theirs.in, input) && pick(theirs.out, output) ? Cause::kNone : Cause::kMismatch;
  }

  // Outputs must be poisoned before the leader says that it is done.
  RINGREDUCE_DEVICE void report(int peer) const {
    for (int r = 0; r < call_.size; ++r) publishWord(call_.abort[r]->copies[0].value, 1);
    if (!claimWord(call_.local->cause, static_cast<uint32_t>(Cause::kMismatch))) return;
    Trouble& trouble = *call_.trouble;
    trouble.operation = call_.operation;
    trouble.step = 0;
    trouble.peer = peer;
    trouble.channel = 0;
    publishWord(trouble.cause, static_cast<uint64_t>(Cause::kMismatch));
  }

  Block& block_;
  const LookCall& call_;
};

// A rank's copy into memory that its peers map; its addends are scaled on the way.
struct CopyCall {
  const std::byte* from;
  std::byte* to;
  size_t count;
  Arithmetic arithmetic;
  AbortFlag* abort;              // as DirectCall's
  const void* factor = nullptr;  // in device memory: replaces arithmetic.factor
};

template <class E, class Block>
RINGREDUCE_DEVICE void copyIn(Block& block, const CopyCall& call, int channel, int channels) {
  using Stored = AsStored<E>;
  constexpr size_t kWidth = sizeof(typename E::Stored);
  // After an abort, a leader of the previous call may still be at work there.
  if (block.any(block.thread() == 0 && call.abort->isSet(channel))) return;
  const size_t each = roundUp(ceilDiv(call.count, static_cast<size_t>(channels)), kChunkElements);
  const Span mine = piece(call.count, each, static_cast<size_t>(channel));
  Arithmetic arithmetic = call.arithmetic;
  if constexpr (E::kFloating)
    if (call.factor) arithmetic.factor = *static_cast<const typename E::Value*>(call.factor);
  Pass<E, Stored, Stored, Stored>::run(
      block, mine.size, ConstSpans<1>{{call.from + mine.begin * kWidth}, 0},
      Spans<1>{{call.to + mine.begin * kWidth}}, arithmetic, false);
}

// Bytes from several places to as many others.
struct CarryCall {
  int places;
  const std::byte* from[kMostRanks];
  std::byte* to[kMostRanks];
  size_t bytes;      // each, a multiple of the kernel's unit
  AbortFlag* abort;  // as DirectCall's
};

template <size_t unit, class Block>
RINGREDUCE_DEVICE void carry(Block& block, const CarryCall& call, int channel, int channels) {
  if (block.any(block.thread() == 0 && call.abort->isSet(channel))) return;
  const size_t each = roundUp(ceilDiv(call.bytes, static_cast<size_t>(channels)), kLine);
  const Span mine = piece(call.bytes, each, static_cast<size_t>(channel));
  for (int i = 0; i < call.places; ++i)
    copyElements<Raw<unit>>(block, mine.size / unit, call.from[i] + mine.begin,
                            Spans<1>{{call.to[i] + mine.begin}});
}

// The end of the schedule at each rank: copies the leaders' sums to the output, if they are not
// there. If the group has given up, it poisons the whole output of the call, earlier pieces too.
struct DeliverCall {
  const std::byte* from;  // null: it is in place
  std::byte* to;
  size_t bytes;
  AbortFlag* abort;
  uint64_t* delivered;  // counts schedules that came to their end
  Local* local;
  std::byte* output;  // of the whole call
  size_t output_bytes;
  unsigned char poison;  // guard.h
};

template <class Block>
RINGREDUCE_DEVICE void deliver(Block& block, const DeliverCall& call, int channel, int channels) {
  // All waits of the schedule are over, and so is its deadline.
  if (channel == 0 && block.thread() == 0)
    publishWord(*call.delivered, observeWord(*call.delivered) + 1);
  // After an abort a leader may still be writing there.
  const bool poisoned = block.any(block.thread() == 0 && call.abort->isSet(channel));
  if (call.from && !poisoned) {
    const size_t each = roundUp(ceilDiv(call.bytes, static_cast<size_t>(channels)), sizeof(Pack));
    const Span mine = piece(call.bytes, each, static_cast<size_t>(channel));
    copyElements<Raw<1>>(block, mine.size, call.from + mine.begin,
                         Spans<1>{{call.to + mine.begin}});
  }
  leaveKernel(block, *call.local, channels, call.abort, call.output, call.output_bytes,
              call.poison);
}

// ---- arguments where each rank leads for itself: a piece of a reduce-scatter, an all-gather or a
// broadcast, as long as the staging memory

// The staging memory of each rank, as mapped here, for the rank that reads it.
struct StagedAt {
  int rank, size;
  std::byte* base[kMostRanks];
  AbortFlag* abort;  // this rank's
};

// Of a reduce-scatter of parts of `count` elements, the elements `piece` of every part are staged
// at once, part after part.  Calls copy(element of the input, element of the staged, how many).
template <class Copy>
void stageParts(int size, size_t count, Span piece, Copy copy) {
  const auto parts = static_cast<size_t>(size);
  if (piece.size == count) return copy(size_t{0}, size_t{0}, parts * count);
  for (size_t p = 0; p < parts; ++p) copy(p * count + piece.begin, p * piece.size, piece.size);
}

// Adds this rank's part of all inputs into its output.
inline DirectCall addParts(const StagedAt& staged, void* output, size_t count, Span piece,
                           size_t width, const Arithmetic& arithmetic) {
  const auto mine = static_cast<size_t>(staged.rank);
  const size_t begin = mine * count + piece.begin;
  DirectCall call{
      .size = staged.size,
      .sinks = 1,
      .chunk = count,  // each part is one
      .begin = begin,
      .elements = piece.size,
      .first = begin,
      .tensors = {.input = {}, .output = {static_cast<std::byte*>(output) + piece.begin * width}},
      .arithmetic = arithmetic,
      .abort = staged.abort};
  for (int r = 0; r < staged.size; ++r)
    call.tensors.input[r] = staged.base[r] + mine * piece.size * width;
  return call;
}

// Bytes from one place to another; nothing if both are the same.
inline CarryCall carryOne(const StagedAt& staged, const std::byte* from, std::byte* to,
                          size_t bytes) {
  return {.places = from != to, .from = {from}, .to = {to}, .bytes = bytes, .abort = staged.abort};
}

// The bytes `piece` of each rank's part, of `part` bytes: this rank's from its input, the others'
// from their staging memory.
inline CarryCall gatherParts(const StagedAt& staged, const void* input, void* output, size_t part,
                             Span piece) {
  CarryCall call{.places = 0, .from = {}, .to = {}, .bytes = piece.size, .abort = staged.abort};
  for (int r = 0; r < staged.size; ++r) {
    const std::byte* from =
        r == staged.rank ? static_cast<const std::byte*>(input) + piece.begin : staged.base[r];
    std::byte* to = static_cast<std::byte*>(output) + static_cast<size_t>(r) * part + piece.begin;
    if (from == to) continue;
    call.from[call.places] = from;
    call.to[call.places++] = to;
  }
  return call;
}

// ---- the ring between hosts

// The addition of a step (nccl_schedule.h): the previous rank's partial sums and this rank's
// addends.
struct RingStepCall {
  const std::byte* partial;
  const std::byte* own;
  std::byte* to;  // may be `partial` if they are as wide as each other, or `own` if it is narrow
  size_t count;
  bool partial_is_wide, to_is_wide;  // as float32; only of halves
  bool last;                         // the sum is complete
  Arithmetic arithmetic;
  const void* factor;  // in device memory: replaces arithmetic.factor
};

template <class E, class Block>
RINGREDUCE_DEVICE void addRingStep(Block& block, const RingStepCall& call, int channel,
                                   int channels) {
  using Stored = AsStored<E>;
  using Value = AsValue<E>;
  constexpr size_t kWidth = sizeof(typename E::Stored), kWide = sizeof(typename E::Value);
  const size_t each = roundUp(ceilDiv(call.count, static_cast<size_t>(channels)), kChunkElements);
  const Span mine = piece(call.count, each, static_cast<size_t>(channel));
  Arithmetic arithmetic = call.arithmetic;
  if constexpr (E::kFloating)
    if (call.factor) arithmetic.factor = *static_cast<const typename E::Value*>(call.factor);
  const ConstSpans<2> sources{{call.partial + mine.begin * (call.partial_is_wide ? kWide : kWidth),
                               call.own + mine.begin * kWidth},
                              1};
  const Spans<1> sink{{call.to + mine.begin * (call.to_is_wide ? kWide : kWidth)}};
  const auto run = [&]<class Partial, class To>() {
    Pass<E, Partial, Stored, To>::run(block, mine.size, sources, sink, arithmetic, call.last);
  };
  if constexpr (isHalf(E::kDType)) {
    if (call.partial_is_wide && call.to_is_wide) return run.template operator()<Value, Value>();
    if (call.partial_is_wide) return run.template operator()<Value, Stored>();
    if (call.to_is_wide) return run.template operator()<Stored, Value>();
  }
  run.template operator()<Stored, Stored>();
}

}  // namespace ringreduce::cuda
