// One all-reduce of a communicator: checking it, choosing its algorithm, putting its kernel into a
// stream and leaving it to the watchdog.  The other calls are in part_calls.cc, the direct schedule
// of all of them in direct_stream.cc.
#include <cuda_runtime_api.h>

#include "base/error.h"
#include "cuda/communicator.h"
#include "cuda/communicator_state.h"

namespace ringreduce::cuda {

// ---- choosing

Choice Communicator::chosen(size_t count, DType dtype) const {
  return state_->choose(count * sizeOf(dtype), state_->options.algorithm);
}

Choice Communicator::State::choose(size_t bytes, Choice choice) const {
  if (choice == Choice::kAuto) {
    if (!setting.run_at_once) return Choice::kDirect;
    switch (chooseKernel(tuning, bytes)) {
      case DeviceAlgorithm::kOneShot:
        return Choice::kOneShot;
      case DeviceAlgorithm::kTwoShot:
        return Choice::kTwoShot;
      default:
        return Choice::kRing;
    }
  }
  if (choice == Choice::kDirect && !staging)
    throw Error(Failure::kArgument,
                "the direct schedule needs memory that is taken when the communicator is made: ask "
                "for it then (RINGREDUCE_CUDA_ALGORITHM=direct)");
  if (choice != Choice::kDirect && !setting.run_at_once)
    throw Error(
        Failure::kArgument,
        std::string(kChoiceNames[static_cast<size_t>(choice)]) +
            " needs kernels of all ranks on their GPUs at once, and ranks of this group are "
            "processes that share a GPU in turns: start NVIDIA's MPS, or leave the choice to "
            "auto, which takes the direct schedule");
  return choice;
}

Choice Communicator::State::choose(const GpuAllReduce& call) const {
  return choose(call.count * sizeOf(call.dtype), call.algorithm.value_or(options.algorithm));
}

void Communicator::State::validate(const GpuAllReduce& call) const {
  cuda::validate(call);
}

void validate(const GpuAllReduce& call) {
  const auto refuse = [](const std::string& why) {
    throw Error(Failure::kArgument, "all_reduce on a GPU: " + why);
  };
  if (!isSupported(call.dtype, call.op))
    refuse(std::string(name(call.op)) + " has no meaning for " + name(call.dtype) +
           ", or its elements can only be moved");
  if (call.count == 0) return;
  if (call.count > SIZE_MAX / sizeOf(call.dtype))
    refuse(std::to_string(call.count) + " elements are more than there is memory for");
  if (!call.input || !call.output)
    refuse("a null pointer for " + std::to_string(call.count) + " elements");
  const auto in = reinterpret_cast<uintptr_t>(call.input);
  const auto out = reinterpret_cast<uintptr_t>(call.output);
  const size_t bytes = call.count * sizeOf(call.dtype);
  if (in % sizeOf(call.dtype) != 0 || out % sizeOf(call.dtype) != 0)
    refuse(std::string("pointers that are not aligned to elements of ") + name(call.dtype));
  if (in != out && in < out + bytes && out < in + bytes)
    refuse("input and output overlap without being the same memory");
}

Arithmetic Communicator::State::arithmeticOf(DType dtype, ReduceOp op, double factor) const {
  return {.combine = combineOf(dtype, op),
          .divide = op == ReduceOp::kAvg,
          .scale = op == ReduceOp::kPremulSum,
          .world_size = group->size(),
          .factor = factor};
}

// ---- launching

void launch(const void* kernel, int blocks, const void* arguments, bool cooperative,
            cudaStream_t stream) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = cooperative;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  void* all[] = {const_cast<void*>(arguments)};
  check(cudaLaunchKernelExC(&config, kernel, all), "launch a kernel");
}

namespace {

DeviceAlgorithm kernelFor(Choice choice) {
  switch (choice) {
    case Choice::kOneShot:
      return DeviceAlgorithm::kOneShot;
    case Choice::kTwoShot:
      return DeviceAlgorithm::kTwoShot;
    default:
      return DeviceAlgorithm::kRing;
  }
}

}  // namespace

Communicator::State::Shape Communicator::State::shapeOf(const GpuAllReduce& call,
                                                        Choice choice) const {
  const DeviceAlgorithm algorithm = kernelFor(choice);
  const size_t stored = sizeOf(call.dtype);
  const size_t value = isHalf(call.dtype) ? sizeof(float) : stored;
  const size_t slice = sliceOf(tuning, algorithm, call.count, group->size(), stored, value);
  return {algorithm, slice, channelsOf(tuning, algorithm, call.count, group->size(), slice)};
}

RankCall Communicator::State::rankCall(const GpuAllReduce& call, const Shape& shape,
                                       uint64_t number) const {
  return {.comm = commOnDevice(),
          .input = call.input,
          .output = call.output,
          .count = call.count,
          .arithmetic = arithmeticOf(call.dtype, call.op, call.factor),
          .factor = call.op == ReduceOp::kPremulSum ? call.factor_on_device : nullptr,
          .timeout = static_cast<uint64_t>(timeoutOf(call.timeout)),
          .operation = number,
          .slice = shape.slice,
          .window = tuning.window,
          .scatter = false,
          .root = kEverybody};
}

Communicator::State::Told Communicator::State::told(const GpuAllReduce& call,
                                                    uint64_t where) const {
  return {{.count = call.count,
           .kind = Kind::kAllReduce,
           .dtype = call.dtype,
           .op = static_cast<uint8_t>(call.op),
           .parts = where},
          timeoutOf(call.timeout),
          call.label};
}

bool Communicator::State::isCapturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  cuda::check(cudaStreamIsCapturing(stream, &status), "ask whether a stream is being captured");
  if (status == cudaStreamCaptureStatusNone) return false;
  watchdog->stayAwake();
  return true;
}

unsigned long long numberOf(cudaStream_t stream) {
  unsigned long long number = 0;
  cuda::check(cudaStreamGetId(stream, &number), "ask which stream it is");
  return number;
}

// Calls of one communicator follow each other, whatever their streams.
void Communicator::State::follow(cudaStream_t stream) {
  if (isCapturing(stream) || !last_ || numberOf(stream) == last_stream_) return;
  last_->holdBack(stream);
}

void Communicator::State::track(const Told& told, cudaStream_t stream) {
  if (isCapturing(stream)) {
    // Nothing runs yet, and no event of a capture tells when it will have.
    watchdog->track(told.timeout, [] { return true; });
    return;
  }
  auto event = events.take();
  event->record(stream);
  last_ = event;
  last_stream_ = numberOf(stream);
  // Asked in a thread of the watchdog, which shall not make a context on another device.
  const auto is_reached = [event, device = device] {
    const OnDevice here(device);
    return event->isReached();
  };
  watchdog->track(told.timeout, is_reached, told.label);
}

void Communicator::State::trackRest(const Told& told, cudaStream_t stream) {
  try {
    track(told, stream);
  } catch (const Error&) {  // a GPU that says nothing any more is not waited for
    watchdog->track(told.timeout, [] { return true; });
  }
}

void Communicator::State::giveUp(const Error& why, const Label& label) {
  group->fail(
      Failure::kAborted, group->rank(),
      group->who(group->rank()) + " gave up: " + why.what() + (label ? " (" + label() + ")" : ""));
}

void Communicator::allReduce(const GpuAllReduce& call, CUstream_st* stream) {
  State& s = *state_;
  s.validate(call);
  const std::lock_guard lock(s.calls);
  const OnDevice here(s.device);
  if (size() == 1)
    // What its own addends are, scaled if asked for.
    return s.dispatch(s.told(call, 0), stream, [&](uint64_t) {
      s.follow(stream);
      s.stage(call, 0, static_cast<std::byte*>(call.output), call.count, stream);
    });
  const Choice choice = s.choose(call);
  if (choice == Choice::kDirect) return s.direct(call, stream);
  s.dispatch(s.told(call, static_cast<uint64_t>(choice)), stream, [&](uint64_t number) {
    if (call.count == 0) return;
    s.follow(stream);
    const State::Shape shape = s.shapeOf(call, choice);
    RanksLaunch arguments{.ranks = 1, .calls = {}};
    arguments.calls[0] = s.rankCall(call, shape, number);
    launch(kernelsOf(call.dtype).all_reduce[static_cast<size_t>(shape.algorithm)], shape.channels,
           &arguments, false, stream);
  });
}

void Communicator::allReduceTogether(std::span<Communicator* const> ranks,
                                     std::span<const GpuAllReduce> calls, CUstream_st* stream) {
  if (ranks.empty() || ranks.size() != calls.size() ||
      ranks.size() > static_cast<size_t>(kMostRanksOfLaunch))
    throw Error(Failure::kArgument, "one launch takes one call for each of 1 to " +
                                        std::to_string(kMostRanksOfLaunch) + " ranks");
  // A ring of one would add its own addends to themselves.
  if (ranks.size() == 1 && ranks[0]->size() == 1) return ranks[0]->allReduce(calls[0], stream);
  RanksLaunch arguments{.ranks = static_cast<int>(ranks.size()), .calls = {}};
  State& first = *ranks[0]->state_;
  const OnDevice here(first.device);
  const Choice choice = first.choose(calls[0]);
  if (choice == Choice::kDirect)
    throw Error(Failure::kArgument, "the direct schedule takes a stream for each rank");
  const State::Shape shape = first.shapeOf(calls[0], choice);
  std::vector<std::unique_lock<std::mutex>> locks;
  for (size_t i = 0; i < ranks.size(); ++i) {
    State& s = *ranks[i]->state_;
    if (static_cast<int>(i) != s.group->rank() || s.group->size() != arguments.ranks)
      throw Error(Failure::kArgument, "a launch for several ranks takes all of a group, by rank");
    locks.emplace_back(s.calls);
    s.validate(calls[i]);
    if (s.device != first.device || calls[i].count != calls[0].count ||
        calls[i].dtype != calls[0].dtype)
      throw Error(Failure::kArgument,
                  "ranks of one launch are on one device and make the same call");
  }
  size_t announced = 0, tracked = 0;
  const Range range(Kind::kAllReduce);
  const auto toldOf = [&](size_t i) {
    return ranks[i]->state_->told(calls[i], static_cast<uint64_t>(choice));
  };
  try {
    for (; announced < ranks.size(); ++announced) {
      State& s = *ranks[announced]->state_;
      arguments.calls[announced] =
          s.rankCall(calls[announced], shape, s.watchdog->announce(toldOf(announced).what));
    }
    for (Communicator* rank : ranks) rank->state_->follow(stream);
    if (calls[0].count > 0)
      launch(kernelsOf(calls[0].dtype).all_reduce[static_cast<size_t>(shape.algorithm)],
             shape.channels * arguments.ranks, &arguments, true, stream);
    for (; tracked < ranks.size(); ++tracked)
      ranks[tracked]->state_->track(toldOf(tracked), stream);
  } catch (const Error& error) {
    for (; tracked < announced; ++tracked)
      ranks[tracked]->state_->trackRest(toldOf(tracked), stream);
    first.giveUp(error, calls[0].label);
  }
}

}  // namespace ringreduce::cuda
