// What an all-reduce puts into a stream: rails, parts, and its end.
#include <utility>

#include "cuda/internode_state.h"
#include "cuda/ranges.h"

namespace ringreduce::cuda {
namespace {

// From here on parts are worth their step: 256 KiB take as long between hosts, at 50 GB/s, as the
// launch that they save.
constexpr size_t kLeastInParts = size_t{256} << 10;

}  // namespace

void InterNodeCommunicator::allReduce(const GpuAllReduce& call, CUstream_st* stream) {
  State& s = *state_;
  validate(call);
  const std::lock_guard lock(s.calls);
  const Range range(Kind::kAllReduce);
  const OnDevice here(s.device);
  cudaStreamCaptureStatus capture;
  cuda::check(cudaStreamIsCapturing(stream, &capture), "ask whether a stream is being captured");
  const bool captured = capture != cudaStreamCaptureStatusNone;
  if (captured) s.watchdog->stayAwake();
  s.watchdog->announce({.count = call.count,
                        .kind = Kind::kAllReduce,
                        .dtype = call.dtype,
                        .op = static_cast<uint8_t>(call.op)});
  const auto pending = std::make_shared<State::Pending>();
  try {
    if (captured) {
      // Nothing runs yet, and no event of a capture tells when it will have.
      s.watchdog->track(s.timeoutOf(call), [] { return true; });
      s.put(call, stream);
      return;
    }
    s.follow(stream);
    const auto begun = s.events.take();
    begun->record(stream);
    // Before it is put there, since a host that is far ahead waits in the midst of it.  The
    // watchdog's threads ask, who shall not make a context on another device.
    s.watchdog->track(
        s.timeoutOf(call),
        [pending, device = s.device] {
          const OnDevice there(device);
          return pending->isOver();
        },
        call.label,
        [begun, device = s.device] {
          const OnDevice there(device);
          return begun->isReached();
        });
    s.put(call, stream);
    s.finish(*pending, stream);
  } catch (const Error& error) {
    s.giveUp(call, error, *pending, stream);
  }
}

void InterNodeCommunicator::State::finish(Pending& pending, cudaStream_t stream) {
  const auto done = events.take();
  done->record(stream);
  last = done;
  last_stream = numberOf(stream);
  pending.set(done);
}

// Of a call that failed on its way something may be in the streams, and the other ranks wait for
// the rest.
void InterNodeCommunicator::State::giveUp(const GpuAllReduce& call, const Error& why,
                                          Pending& pending, cudaStream_t stream) {
  try {
    // The error of this host's group names the rank to blame.
    if (host_group->failed()) group->fail(why.kind(), hosts.rank(), causeOf(why.what()));
    group->fail(Failure::kAborted, hosts.rank(),
                group->who(hosts.rank()) + " gave up: " + why.what() +
                    (call.label ? " (" + call.label() + ")" : ""));
  } catch (const Error&) {
    poison();
    try {
      deliver(call, stream);
      finish(pending, stream);
    } catch (const Error&) {  // a GPU that says nothing any more is not waited for
      pending.set(nullptr);
    }
    throw;
  }
}

void InterNodeCommunicator::State::put(const GpuAllReduce& call, cudaStream_t stream) {
  if (!hierarchical)
    overAll(call, stream);
  else if (call.count * sizeOf(call.dtype) >= kLeastInParts)
    sumInParts(call, stream);
  else if (call.count > 0)
    sumWhole(call, stream);
  deliver(call, stream);
}

// Calls follow each other, whatever their streams.
void InterNodeCommunicator::State::follow(cudaStream_t stream) {
  if (last && last_stream != numberOf(stream)) last->holdBack(stream);
}

void InterNodeCommunicator::State::overAll(const GpuAllReduce& call, cudaStream_t stream) {
  const Arithmetic arithmetic{.combine = combineOf(call.dtype, call.op),
                              .divide = call.op == ReduceOp::kAvg,
                              .scale = call.op == ReduceOp::kPremulSum,
                              .world_size = hosts.size(),
                              .factor = call.factor};
  ring->allReduce({.input = call.input,
                   .output = call.output,
                   .count = call.count,
                   .dtype = call.dtype,
                   .arithmetic = arithmetic,
                   .factor_on_device = call.factor_on_device,
                   .abort = &onDevice()->abort},
                  stream, [this] { watchdog->check(); });
}

// What hosts have summed, in place: scaled already, and divided by all ranks only now.
void InterNodeCommunicator::State::between(void* data, size_t count, const GpuAllReduce& call,
                                           cudaStream_t stream) {
  const Arithmetic arithmetic{.combine = combineOf(call.dtype, call.op),
                              .divide = call.op == ReduceOp::kAvg,
                              .scale = false,
                              .world_size = hosts.size(),
                              .factor = 1};
  ring->allReduce({.input = data,
                   .output = data,
                   .count = count,
                   .dtype = call.dtype,
                   .arithmetic = arithmetic,
                   .abort = &onDevice()->abort},
                  stream, [this] { watchdog->check(); });
}

void InterNodeCommunicator::State::sumWhole(const GpuAllReduce& call, cudaStream_t stream) {
  GpuAllReduce inside = call;
  if (call.op == ReduceOp::kAvg) inside.op = ReduceOp::kSum;
  inside.timeout = timeoutOf(call);
  inside.algorithm = std::nullopt;
  local->allReduce(inside, stream);
  between(call.output, call.count, call, stream);
}

void InterNodeCommunicator::State::sumInParts(const GpuAllReduce& call, cudaStream_t stream) {
  const size_t width = sizeOf(call.dtype), ranks = hosts.neighbours().size();
  const size_t part = call.count / ranks, whole = part * ranks;
  auto* const output = static_cast<std::byte*>(call.output);
  std::byte* const own = output + static_cast<size_t>(rail) * part * width;
  local->reduceScatter({.input = call.input,
                        .output = own,
                        .count = part,
                        .dtype = call.dtype,
                        .op = call.op == ReduceOp::kAvg ? ReduceOp::kSum : call.op,
                        .factor = call.factor,
                        .factor_on_device = call.factor_on_device,
                        .timeout = timeoutOf(call),
                        .label = call.label},
                       stream);
  between(own, part, call, stream);
  // Who waits here waits for rails of others, whose own deadline is to come first: it knows more.
  local->allGather({.input = own,
                    .output = output,
                    .count = part,
                    .dtype = call.dtype,
                    .timeout = 2 * timeoutOf(call),
                    .label = call.label},
                   stream);
  if (whole == call.count) return;
  GpuAllReduce rest = call;
  rest.input = static_cast<const std::byte*>(call.input) + whole * width;
  rest.output = output + whole * width;
  rest.count = call.count - whole;
  rest.timeout = 2 * timeoutOf(call);
  sumWhole(rest, stream);
}

// The end of each call: its output is poisoned if the group has given up.
void InterNodeCommunicator::State::deliver(const GpuAllReduce& call, cudaStream_t stream) {
  auto* output = static_cast<std::byte*>(call.output);
  const DeliverCall arguments{.from = nullptr,
                              .to = output,
                              .bytes = 0,
                              .abort = &onDevice()->abort,
                              .delivered = &onDevice()->delivered,
                              .local = reinterpret_cast<Local*>(counters->data()),
                              .output = output,
                              .output_bytes = call.count * sizeOf(call.dtype)};
  launch(deliverKernel(), 1, &arguments, false, stream);
}

}  // namespace ringreduce::cuda
