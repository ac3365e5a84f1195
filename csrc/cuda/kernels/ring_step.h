// The addition of a step of the ring between hosts (nccl_schedule.h): partial sums that came from
// the previous rank, and this rank's own addends.  It waits for nothing: when it runs, the stream
// has waited.
#pragma once

#include "algorithm/cut.h"
#include "cuda/kernels/reduce_n.h"

namespace ringreduce::cuda {

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
