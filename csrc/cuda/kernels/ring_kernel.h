// All-reduce by ring on a GPU: algorithm/ring.h's schedule, run by each channel's block on its
// slices.
//
// Bytes through device memory, all ranks on one GPU, for a message of S bytes and P ranks: a rank's
// blocks read and write (6P - 4) / P of S.  Addends travel as `Value`: where that is w times as
// wide as the dtype, they add 2 (P - 1) / P (w - 1) S.
#pragma once

#include "algorithm/cut.h"
#include "algorithm/ring.h"
#include "cuda/kernels/guard.h"
#include "cuda/kernels/kernel_call.h"
#include "cuda/kernels/reduce_n.h"
#include "transport/shm/pipe.h"

namespace ringreduce::cuda {

// ----
//
// The five ring primitives (algorithm/ring.h) for a thread block: pipes into the next rank's
// memory, one channel a block, and elements moved by all threads.
//
// The channels of a rank share out the slices of each chunk: slice j here is slice j * channels +
// channel of the chunk.  Thread 0 watches and posts for the pipe that comes in, another for the one
// that goes out; a block barrier stands before every publish and inside every wait, so all threads
// see what one thread observed.
//
// Addends travel unrounded to the owner: halves are rounded once, as on a CPU.  Finished values
// travel from the owner as they are stored.

template <class E, class Rules, class Block>
class DevicePrimitives {
 public:
  RINGREDUCE_DEVICE DevicePrimitives(Block& block, Guard<Block>& guard, const RankCall& call,
                                     int channel, int channels)
      : block_(block),
        guard_(guard),
        call_(call),
        channel_(channel),
        channels_(channels),
        chunk_(Cut{call.count, call.comm->size}.chunkSize()),
        sender_{.emptied = flag(rank(), layout().emptiedFlag(channel)),
                .filled = flag(rank(1), layout().filledFlag(channel)),
                .depth = layout().depth,
                .next = counters().sent},
        receiver_{.filled = flag(rank(), layout().filledFlag(channel)),
                  .emptied = flag(rank(-1), layout().emptiedFlag(channel)),
                  .depth = layout().depth,
                  .next = counters().received} {}

  RINGREDUCE_DEVICE void send(int chunk, size_t j) {
    if (!await(false, true)) return;
    const Span s = span(chunk, j);
    Pass<E, Stored, Stored, Value>::run(block_, s.size, ConstSpans<1>{{input(s)}, 0},
                                        Spans<1>{{room()}}, call_.arithmetic, false);
    finish(false, true);
  }

  RINGREDUCE_DEVICE void recvReduceSend(int chunk, size_t j) {
    if (!await(true, true)) return;
    const Span s = span(chunk, j);
    Pass<E, Value, Stored, Value>::run(block_, s.size, ConstSpans<2>{{slot(), input(s)}, 1},
                                       Spans<1>{{room()}}, call_.arithmetic, false);
    finish(true, true);
  }

  RINGREDUCE_DEVICE void recvReduceCopySend(int chunk, size_t j) {
    if (!await(true, true)) return;
    const Span s = span(chunk, j);
    Pass<E, Value, Stored, Stored>::run(block_, s.size, ConstSpans<2>{{slot(), input(s)}, 1},
                                        Spans<2>{{output(s), room()}}, call_.arithmetic, true);
    finish(true, true);
  }

  RINGREDUCE_DEVICE void recvCopySend(int chunk, size_t j) {
    if (!await(true, true)) return;
    const Span s = span(chunk, j);
    copyElements<E>(block_, s.size, slot(), Spans<2>{{output(s), room()}});
    finish(true, true);
  }

  RINGREDUCE_DEVICE void recv(int chunk, size_t j) {
    if (!await(true, false)) return;
    const Span s = span(chunk, j);
    copyElements<E>(block_, s.size, slot(), Spans<1>{{output(s)}});
    finish(true, false);
  }

  // For the next kernel; called once, by all threads.
  RINGREDUCE_DEVICE void save() const {
    if (block_.thread() != 0) return;
    counters().sent = sender_.next;
    counters().received = receiver_.next;
  }

 protected:  // tests derive primitives with a mistake in them
  using Stored = AsStored<E>;
  using Value = AsValue<E>;
  static constexpr size_t kWidth = sizeof(typename E::Stored);

  // Both ways at once, so that one wait hides behind the other.
  RINGREDUCE_DEVICE bool await(bool in, bool out) {
    const int first = in ? 0 : 1;
    return guard_.until(
        in + out, [&](int i) { return first + i == 0 ? receiver_.hasNext() : sender_.hasRoom(); },
        [&](int i) { return rank(first + i == 0 ? -1 : 1); },
        [&](int i) { return first + i == 0 ? receiver_.next : sender_.next; });
  }

  RINGREDUCE_DEVICE void finish(bool in, bool out) {
    block_.sync();
    if (out) sender_.post(block_.thread() == 0);
    if (in) receiver_.release(block_.thread() == block_.threads() - 1);
  }

  // Slice j of a chunk; empty where this chunk is shorter than the first.
  RINGREDUCE_DEVICE Span span(int chunk, size_t j) const {
    const Span whole = piece(call_.count, chunk_, static_cast<size_t>(chunk));
    const size_t i = j * static_cast<size_t>(channels_) + static_cast<size_t>(channel_);
    Span s = piece(whole.size, call_.slice, i);
    s.begin += whole.begin;
    return s;
  }

  RINGREDUCE_DEVICE const DeviceLayout& layout() const { return call_.comm->layout; }
  RINGREDUCE_DEVICE int rank(int offset = 0) const {
    return (call_.comm->rank + offset + call_.comm->size) % call_.comm->size;
  }
  RINGREDUCE_DEVICE Flag* flag(int of, size_t at) const {
    return reinterpret_cast<Flag*>(call_.comm->base[of] + at);
  }
  RINGREDUCE_DEVICE Counters& counters() const { return call_.comm->local->counters[channel_]; }
  RINGREDUCE_DEVICE std::byte* room() const {
    return call_.comm->base[rank(1)] + layout().ringSlot(channel_, sender_.slot());
  }
  RINGREDUCE_DEVICE const std::byte* slot() const {
    return call_.comm->base[rank()] + layout().ringSlot(channel_, receiver_.slot());
  }
  RINGREDUCE_DEVICE const std::byte* input(Span s) const {
    return static_cast<const std::byte*>(call_.input) + s.begin * kWidth;
  }
  RINGREDUCE_DEVICE std::byte* output(Span s) const {
    return static_cast<std::byte*>(call_.output) + s.begin * kWidth;
  }

  Block& block_;
  Guard<Block>& guard_;
  const RankCall& call_;
  const int channel_, channels_;
  const size_t chunk_;  // a division that is not to be done for each slice
  PipeSender<Rules> sender_;
  PipeReceiver<Rules> receiver_;
};

// How many of `slices` one of `channels` has, when they are dealt out in turn.
constexpr size_t slicesOf(int channel, int channels, size_t slices) {
  const auto c = static_cast<size_t>(channel), n = static_cast<size_t>(channels);
  return slices <= c ? 0 : ceilDiv(slices - c, n);
}

template <class E, class Rules, class Block,
          template <class, class, class> class Primitives = DevicePrimitives>
RINGREDUCE_DEVICE void ring(Block& block, Guard<Block>& guard, const RankCall& call, int channel,
                            int channels) {
  const Cut cut{call.count, call.comm->size};
  const size_t slices = slicesOf(channel, channels, ceilDiv(cut.chunkSize(), call.slice));
  if (slices == 0) return;  // no barrier between the reading of the counters and their saving
  Primitives<E, Rules, Block> primitives(block, guard, call, channel, channels);
  runRing(primitives, {.rank = call.comm->rank,
                       .world_size = call.comm->size,
                       .slices = slices,
                       .window = call.window});
  primitives.save();
}

}  // namespace ringreduce::cuda
