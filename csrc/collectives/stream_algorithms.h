// The common parts of collectives over streams: slices, all-gathers of blocks, the direct sum, the
// ring.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "algorithm/cut.h"
#include "algorithm/ring.h"
#include "base/dtype.h"
#include "collectives/over_streams.h"
#include "kernels/reduce.h"
#include "transport/transport.h"

namespace ringreduce {

// ---- slices
//
// The size of slices in a stream: small enough that ranks send while they add, large enough that a
// slice costs little, and at most a buffer of the transport.

inline constexpr size_t kLeastSlice = 16 << 10;
inline constexpr size_t kSlicesWanted = 16;

// Elements of a slice, for a message of `count` elements of `width` bytes.  A multiple of
// kChunkElements.
constexpr size_t sliceElements(size_t count, size_t width) {
  const size_t bytes = std::clamp(ceilDiv(count * width, kSlicesWanted), kLeastSlice, kPieceBytes);
  return bytes / width / kChunkElements * kChunkElements;
}
static_assert(sliceElements(0, 16) > 0);

// The same for bytes that are not added.
constexpr size_t sliceBytes(size_t bytes) {
  return sliceElements(bytes, 1);
}

// Even an empty message has a slice, so that ranks compare signatures.
constexpr size_t slicesOf(size_t count, size_t slice) {
  return std::max<size_t>(1, ceilDiv(count, slice));
}

// ---- blocks
//
// All-gather of blocks, for the all-gather and the small all-reduce.
//
// A rank numbers blocks from its own: block x belongs to rank + x (mod P).  A ring may be of some
// ranks only, in an order of their own; block x then belongs to the x-th of them after this one.

struct Blocks {
  const std::byte* own;
  std::vector<std::byte*> places;  // destinations; the first is not used
  std::vector<size_t> bytes;
  std::vector<int> ranks = {};  // of the ring; empty: all, in order

  const std::byte* at(size_t x) const { return x == 0 ? own : places[x]; }
};

// Few steps.  Source: Bruck, Ho, Kipnis, Upfal and Weathersby, "Efficient algorithms for all-to-all
// communications in multiport message-passing systems" (1997).  A rank that has the blocks 0 ...
// n-1 sends them to the ranks n, 2n, ... (radix-1) n before it, and receives as many from those
// after it: each step multiplies the number of blocks by the radix.
void gatherByBruck(Transport& transport, const Blocks& blocks, int radix);

// Slice by slice round the ring: each rank forwards the blocks that it receives, except the last.
// A rank sends no further ahead of what it receives than streamWindow().
void gatherByRing(OverStreams& c, const Blocks& blocks);

// ---- direct sum
//
// One rank adds the inputs of all, slice by slice, in the canonical order: the small reduce
// and reduce-scatter, and the first half of two-shot.

class DirectSum {
 public:
  // Of `count` elements.  `owned_by`: the rank whose order of addition applies, or kByChunk: each
  // chunk has its owner's order.
  static constexpr int kByChunk = -1;
  DirectSum(OverStreams& c, DType dtype, ReduceOp op, size_t count, int owned_by)
      : c_(c),
        kernels_(reduceKernels(dtype, op)),
        width_(sizeOf(dtype)),
        count_(count),
        slice_(sliceElements(count, width_)),
        slices_(slicesOf(count, slice_)),
        owned_by_(owned_by) {}

  // Call it once, before any other expectation of this rank.
  void expect() {
    for (; expected_ < slices_ && expected_ < kAhead; ++expected_) expectSlice(expected_);
  }
  // Whether all slices are expected.
  bool expectsAll() const { return expected_ == slices_; }

  // Adds all slices; `output` may be `own`.  Calls visit(span) after each slice.
  template <class Visit>
  void run(const std::byte* own, std::byte* output, Visit visit) {
    const auto P = static_cast<size_t>(c_.size);
    std::vector<const std::byte*> sources(P);
    std::vector<const void*> ordered(P);
    const auto add = [&](int owner, size_t begin, size_t n, size_t slice_begin) {
      for (int k = 0; k < c_.size; ++k) {
        const auto r = static_cast<size_t>(c_.kthToAdd(owner, k));
        ordered[static_cast<size_t>(k)] = sources[r] + (begin - slice_begin) * width_;
      }
      kernels_.reduce(output + begin * width_, ordered.data(), c_.size, n, c_.size);
    };
    for (size_t j = 0; j < slices_; ++j) {
      const Span s = piece(count_, slice_, j);
      forEachOther([&](int r) { sources[static_cast<size_t>(r)] = c_.transport.peek(r); });
      sources[static_cast<size_t>(c_.rank)] = own + s.begin * width_;
      if (owned_by_ != kByChunk)
        add(owned_by_, s.begin, s.size, s.begin);
      else
        Cut{count_, c_.size}.forEachChunk(
            s, [&](int chunk, size_t begin, size_t n) { add(chunk, begin, n, s.begin); });
      forEachOther([&](int r) { c_.transport.release(r); });
      if (expected_ < slices_) expectSlice(expected_++);
      visit(s);
    }
  }

 private:
  // Slices expected from a rank in advance: bounds the memory that a fast rank fills while this one
  // waits for a slow rank.
  static constexpr size_t kAhead = 32;

  template <class Visit>
  void forEachOther(Visit visit) {
    for (int k = 1; k < c_.size; ++k) visit((c_.rank + k) % c_.size);
  }
  void expectSlice(size_t j) {
    forEachOther([&](int r) { c_.transport.expect(r, piece(count_, slice_, j).size * width_); });
  }

  OverStreams& c_;
  const ReduceKernels& kernels_;
  const size_t width_, count_, slice_, slices_;
  const int owned_by_;
  size_t expected_ = 0;
};

// ---- ring
//
// The five ring primitives (algorithm/ring.h) over a transport.  The ring runs twice: once to name
// the destinations of everything that will arrive (ExpectRing), and once to send and add
// (MoveRing).
//
// The same ring serves three calls, which differ in what happens to a chunk that is complete at its
// owner (Ending): it goes round once more as a copy, stays there, or goes to a root.
//
// A ring is of all ranks in order, or of the ranks in a list, in that order; then a chunk's number
// is its owner's position in the list.
//
// Inputs are sent as they are, in their own type.  Partial sums of 16-bit floats are float32, in
// buffers of the transport.  Partial sums of other types are made in place, if that memory is to be
// written anyway, and sent from there.  That is safe although the final value is expected in the
// same place from the start: the final value is computed from this partial sum, so no byte of it
// can arrive before the next rank has received all of the partial sum.  The same holds for inputs
// that are still lent.
//
// If the inputs are sums of ranks of a host (RingCall::ofSums), they are of the partial type, and
// are added in place.

enum class Ending { kEverybody, kOwner, kRoot };

struct RingChunk {
  const std::byte* input;  // this rank's addends
  std::byte* output;       // of the result; null if it is not wanted
  size_t count;
  std::byte* sums = nullptr;  // memory for partial sums; may be `input`
};

struct RingCall {
  RingCall(std::vector<RingChunk> chunks, DType dtype, ReduceOp op, Ending ending, int root = -1)
      : chunks(std::move(chunks)),
        dtype(dtype),
        addend(dtype),
        kernels(reduceKernels(dtype, op)),
        hop(&reduceKernels(dtype, op == ReduceOp::kAvg ? ReduceOp::kSum : op)),
        ending(ending),
        root(root) {
    size_t most = 0;
    for (const RingChunk& chunk : this->chunks) most = std::max(most, chunk.count);
    slice = sliceElements(most, sizeOf(kernels.partial));
    slices = slicesOf(most, slice);
  }

  // Inputs are partial sums, of `world_size` ranks in total.
  static RingCall ofSums(std::vector<RingChunk> chunks, DType dtype, ReduceOp op,
                         std::vector<int> ranks, int world_size, Ending ending) {
    const DType partial = reduceKernels(dtype, op).partial;
    RingCall call(std::move(chunks), dtype, op, ending);
    call.addend = partial;
    call.hop = &reduceKernels(partial, op == ReduceOp::kAvg ? ReduceOp::kSum : op);
    call.sums = true;
    call.ranks = std::move(ranks);
    call.world_size = world_size;
    return call;
  }

  std::vector<RingChunk> chunks;
  DType dtype, addend;  // of the result, of the inputs
  const ReduceKernels& kernels;
  const ReduceKernels* hop;  // for a hop that only adds: AVG divides at the end
  Ending ending;
  int root;
  bool sums = false;
  std::vector<int> ranks = {};  // empty: all, in order
  int world_size = 0;           // that an average divides by; 0: the ring's
  size_t slice, slices;         // elements a slice, slices a chunk
};

// Common to both passes.
class RingPass {
 public:
  // The shape of the ring, except for the window.
  static RingShape shapeOf(const Transport& transport, const RingCall& call) {
    RingShape shape{.rank = transport.rank(),
                    .world_size = transport.size(),
                    .slices = call.slices,
                    .window = 1};
    if (call.ranks.empty()) return shape;
    shape.rank = static_cast<int>(
        std::find(call.ranks.begin(), call.ranks.end(), transport.rank()) - call.ranks.begin());
    shape.world_size = static_cast<int>(call.ranks.size());
    return shape;
  }

 protected:
  RingPass(Transport& transport, const RingCall& call)
      : transport_(transport),
        call_(call),
        shape_(shapeOf(transport, call)),
        P_(shape_.world_size),
        me_(shape_.rank),
        next_(rankAt((me_ + 1) % P_)),
        previous_(rankAt((me_ + P_ - 1) % P_)),
        width_(sizeOf(call.dtype)),
        input_width_(sizeOf(call.addend)) {}

  int rankAt(int place) const {
    return call_.ranks.empty() ? place : call_.ranks[static_cast<size_t>(place)];
  }

  const RingChunk& chunk(int c) const { return call_.chunks[static_cast<size_t>(c)]; }
  // Slice j of a chunk; empty where this chunk is shorter than the longest.
  Span span(int c, size_t j) const { return piece(chunk(c).count, call_.slice, j); }
  const std::byte* input(int c, Span s) const { return chunk(c).input + s.begin * input_width_; }
  std::byte* output(int c, Span s) const { return chunk(c).output + s.begin * width_; }
  // Memory for partial sums; null: a buffer of the transport.
  std::byte* sums(int c, Span s) const {
    if (chunk(c).sums) return chunk(c).sums + s.begin * sizeOf(call_.kernels.partial);
    return !widens() && call_.ending == Ending::kEverybody ? output(c, s) : nullptr;
  }
  // Whether a chunk arrives as the input of one rank, not as a sum.
  bool arrivesUnadded(int c) const { return c == (me_ + P_ - 2) % P_; }
  bool widens() const { return call_.kernels.partial != call_.addend; }
  // Bytes of an element of a chunk as it arrives.
  size_t arrivingWidth(int c) const {
    return arrivesUnadded(c) ? input_width_ : sizeOf(call_.kernels.partial);
  }

  Transport& transport_;
  const RingCall& call_;
  const RingShape shape_;
  const int P_, me_;  // ranks of the ring, and this one's place
  const int next_, previous_;
  const size_t width_, input_width_;
};

class ExpectRing : RingPass {
 public:
  ExpectRing(Transport& transport, const RingCall& call) : RingPass(transport, call) {}

  void send(int, size_t) {}
  void recvReduceSend(int c, size_t j) {
    transport_.expect(previous_, span(c, j).size * arrivingWidth(c));
  }
  void recvReduceCopySend(int c, size_t j) { recvReduceSend(c, j); }
  void recvCopySend(int c, size_t j) {
    const Span s = span(c, j);
    if (call_.ending == Ending::kEverybody)
      transport_.expect(previous_, output(c, s), s.size * width_);
    else if (call_.ending == Ending::kRoot && transport_.rank() == call_.root)
      transport_.expect(rankAt(c), output(c, s), s.size * width_);
  }
  void recv(int c, size_t j) { recvCopySend(c, j); }
};

class MoveRing : RingPass {
 public:
  MoveRing(Transport& transport, const RingCall& call) : RingPass(transport, call) {}

  void send(int c, size_t j) {
    const Span s = span(c, j);
    transport_.send(next_, input(c, s), s.size * input_width_);
  }

  void recvReduceSend(int c, size_t j) {
    const Span s = span(c, j);
    const std::byte* in = transport_.peek(previous_);
    const size_t width = sizeOf(call_.kernels.partial);
    if (std::byte* sum = sums(c, s)) {
      call_.hop->finish(sum, in, input(c, s), s.size, 1);
      transport_.release(previous_);
      transport_.send(next_, sum, s.size * width);
      return;
    }
    std::byte* sum = transport_.acquire(next_);
    if (widens() && arrivesUnadded(c)) {
      call_.kernels.widen(sum, in, s.size);
      in = sum;
    }
    call_.kernels.combine(sum, in, input(c, s), s.size);
    transport_.release(previous_);
    transport_.post(next_, sum, s.size * width);
  }

  void recvReduceCopySend(int c, size_t j) {
    const Span s = span(c, j);
    const std::byte* in = transport_.peek(previous_);
    const int world_size = call_.world_size > 0 ? call_.world_size : P_;
    const bool leaves = call_.ending == Ending::kRoot && transport_.rank() != call_.root;
    std::byte* result = leaves ? transport_.acquire(call_.root) : output(c, s);
    if (call_.sums) {
      call_.kernels.finishSums(result, in, input(c, s), s.size, world_size);
    } else if (arrivesUnadded(c)) {
      const void* const both[] = {in, input(c, s)};
      call_.kernels.reduce(result, both, 2, s.size, world_size);
    } else {
      call_.kernels.finish(result, in, input(c, s), s.size, world_size);
    }
    transport_.release(previous_);
    if (leaves) transport_.post(call_.root, result, s.size * width_);
    if (call_.ending == Ending::kEverybody) transport_.send(next_, result, s.size * width_);
  }

  void recvCopySend(int c, size_t j) {
    recv(c, j);
    if (call_.ending != Ending::kEverybody) return;
    const Span s = span(c, j);
    transport_.send(next_, output(c, s), s.size * width_);
  }

  void recv(int c, size_t) {
    if (call_.ending == Ending::kOwner) return;
    if (call_.ending == Ending::kRoot && transport_.rank() != call_.root) return;
    const int from = call_.ending == Ending::kRoot ? rankAt(c) : previous_;
    transport_.peek(from);
    transport_.release(from);
  }
};

// Bound of the bytes in flight on all ranks of a ring together.  A slow rank may hold nearly all of
// them: the other ranks send theirs and wait for its sums.
inline constexpr size_t kMostUnderWay = 256 << 20;

// The rate, in bytes/s, that the window of a ring allows for: more than one stream over TCP moves.
inline constexpr double kMostRate = 5e9;

// How many slices of each chunk are in flight: a bound on how far a rank's sends run ahead of what
// it receives.  It is what the wire needs and not more.  A long queue in one direction of a line
// delays the acknowledgements of the other direction, and congestion control then keeps that one
// far below the line's rate (docs/hosts.md).
//
// A rank has twice as many buffers as partial sums in flight, since as many results may be in
// flight to a root that is the next rank.  So the ranks never all wait for a buffer.
constexpr size_t streamWindow(size_t slices, size_t slice_bytes, int ranks, size_t buffers,
                              const WireCost& cost) {
  const size_t of_each_chunk = kMostUnderWay / kPieceBytes / static_cast<size_t>(ranks);
  const size_t wanted = 3 * kPieceBytes + static_cast<size_t>(cost.hop * kMostRate);
  return std::min({slices, buffers / 2 - 1, std::max<size_t>(1, of_each_chunk),
                   ceilDiv(wanted, std::max<size_t>(1, slice_bytes))});
}

inline void runStreamRing(OverStreams& c, const RingCall& call,
                          size_t buffers = Transport::kWindow) {
  RingShape shape = RingPass::shapeOf(c.transport, call);
  shape.window = streamWindow(call.slices, call.slice * sizeOf(call.kernels.partial),
                              shape.world_size, buffers, c.options.cost);
  ExpectRing expect(c.transport, call);
  runRing(expect, shape);
  MoveRing move(c.transport, call);
  runRing(move, shape);
}

}  // namespace ringreduce
