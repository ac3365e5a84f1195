// The calls of a communicator besides all-reduce: reduce_scatter, all_gather and broadcast.
#include <string>

#include "base/error.h"
#include "cuda/communicator.h"
#include "cuda/communicator_state.h"

namespace ringreduce::cuda {

bool Communicator::performs(Kind kind) const {
  return kind == Kind::kAllReduce || kind == Kind::kReduceScatter || kind == Kind::kAllGather ||
         kind == Kind::kBroadcast;
}

// ---- checking

namespace {

[[noreturn]] void refuse(Kind kind, const std::string& why) {
  throw Error(Failure::kArgument,
              std::string(kKindNames[static_cast<size_t>(kind)]) + " on a GPU: " + why);
}

uintptr_t addressOf(const void* p) {
  return reinterpret_cast<uintptr_t>(p);
}

// `parts` of `count` elements each.
void requireRoom(Kind kind, DType dtype, size_t parts, size_t count) {
  if (count > SIZE_MAX / sizeOf(dtype) / parts)
    refuse(kind, std::to_string(parts) + " times " + std::to_string(count) +
                     " elements are more than there is memory for");
}

void requirePointer(Kind kind, DType dtype, const void* p, size_t count) {
  if (!p) refuse(kind, "a null pointer for " + std::to_string(count) + " elements");
  // Complex numbers are aligned as their parts are.
  if (addressOf(p) % std::min<size_t>(sizeOf(dtype), sizeof(double)) != 0)
    refuse(kind, std::string("pointers that are not aligned to elements of ") + name(dtype));
}

// One part, here or there, may be the same memory as the rank's own part of all of them.
void requireOwnPlace(Kind kind, const void* part, const void* all, size_t bytes, int rank,
                     int size) {
  const uintptr_t p = addressOf(part), a = addressOf(all);
  const size_t own = static_cast<size_t>(rank) * bytes, whole = static_cast<size_t>(size) * bytes;
  if (p != a + own && p < a + whole && a < p + bytes)
    refuse(kind, "input and output overlap, and not just in this rank's own part");
}

}  // namespace

void Communicator::State::validate(const GpuReduceScatter& call) const {
  constexpr Kind kKind = Kind::kReduceScatter;
  if (!isSupported(call.dtype, call.op))
    refuse(kKind, std::string(name(call.op)) + " has no meaning for " + name(call.dtype) +
                      ", or its elements can only be moved");
  if (call.count == 0) return;
  requireRoom(kKind, call.dtype, static_cast<size_t>(group->size()), call.count);
  requirePointer(kKind, call.dtype, call.input, call.count);
  requirePointer(kKind, call.dtype, call.output, call.count);
  requireOwnPlace(kKind, call.output, call.input, call.count * sizeOf(call.dtype), group->rank(),
                  group->size());
}

void Communicator::State::validate(const GpuAllGather& call) const {
  constexpr Kind kKind = Kind::kAllGather;
  if (call.count == 0) return;
  requireRoom(kKind, call.dtype, static_cast<size_t>(group->size()), call.count);
  requirePointer(kKind, call.dtype, call.input, call.count);
  requirePointer(kKind, call.dtype, call.output, call.count);
  requireOwnPlace(kKind, call.input, call.output, call.count * sizeOf(call.dtype), group->rank(),
                  group->size());
}

void Communicator::State::validate(const GpuBroadcast& call) const {
  constexpr Kind kKind = Kind::kBroadcast;
  if (call.root < 0 || call.root >= group->size())
    refuse(kKind, "its root, rank " + std::to_string(call.root) + ", is none of the group's " +
                      std::to_string(group->size()) + " ranks");
  if (call.count == 0) return;
  requireRoom(kKind, call.dtype, 1, call.count);
  requirePointer(kKind, call.dtype, call.data, call.count);
}

// ---- what ranks compare

Communicator::State::Told Communicator::State::told(const GpuReduceScatter& call) const {
  return {{.count = call.count,
           .kind = Kind::kReduceScatter,
           .dtype = call.dtype,
           .op = static_cast<uint8_t>(call.op)},
          timeoutOf(call.timeout),
          call.label};
}
Communicator::State::Told Communicator::State::told(const GpuAllGather& call) const {
  return {{.count = call.count, .kind = Kind::kAllGather, .dtype = call.dtype},
          timeoutOf(call.timeout),
          call.label};
}
Communicator::State::Told Communicator::State::told(const GpuBroadcast& call) const {
  return {{.count = call.count, .kind = Kind::kBroadcast, .dtype = call.dtype, .root = call.root},
          timeoutOf(call.timeout),
          call.label};
}

// ---- putting them into streams

// The same on all ranks, since rank 0's option holds for all.
Choice Communicator::State::chooseForParts() const {
  return setting.run_at_once && options.algorithm != Choice::kDirect ? Choice::kTwoShot
                                                                     : Choice::kDirect;
}

void Communicator::State::push(const RankCall& call, const void* kernel, size_t bytes,
                               cudaStream_t stream) {
  const bool two_hops = call.root != kEverybody && call.scatter;
  const PartShape shape = partShapeOf(tuning, call.count, group->size(), bytes, two_hops);
  RanksLaunch arguments{.ranks = 1, .calls = {call}};
  RankCall& of_rank = arguments.calls[0];
  of_rank.comm = commOnDevice();
  of_rank.slice = shape.slice;
  of_rank.window = tuning.window;
  launch(kernel, shape.channels, &arguments, false, stream);
}

void Communicator::reduceScatter(const GpuReduceScatter& call, CUstream_st* stream) {
  State& s = *state_;
  s.validate(call);
  const std::lock_guard lock(s.calls);
  const OnDevice here(s.device);
  if (size() > 1 && s.chooseForParts() == Choice::kDirect) return s.direct(call, stream);
  const State::Told told = s.told(call);
  s.dispatch(told, stream, [&](uint64_t number) {
    if (call.count == 0) return;
    s.follow(stream);
    if (size() == 1)
      return s.stage(call, 0, static_cast<std::byte*>(call.output), call.count, stream);
    const RankCall of_rank{
        .comm = nullptr,
        .input = call.input,
        .output = call.output,
        .count = call.count,
        .arithmetic = s.arithmeticOf(call.dtype, call.op, call.factor),
        .factor = call.op == ReduceOp::kPremulSum ? call.factor_on_device : nullptr,
        .timeout = static_cast<uint64_t>(told.timeout),
        .operation = number,
        .slice = 0,
        .window = 0,
        .scatter = true,
        .root = kEverybody};
    s.push(of_rank,
           kernelsOf(call.dtype).all_reduce[static_cast<size_t>(DeviceAlgorithm::kTwoShot)],
           sizeOf(call.dtype), stream);
  });
}

namespace {

// What is only moved, in units.
RankCall movingCall(const void* input, void* output, size_t bytes, int unit, int root,
                    Nanos timeout, uint64_t number) {
  return {.comm = nullptr,
          .input = input,
          .output = output,
          .count = bytes / unitBytes(unit),
          .arithmetic = {},
          .factor = nullptr,
          .timeout = static_cast<uint64_t>(timeout),
          .operation = number,
          .slice = 0,
          .window = 0,
          .scatter = false,
          .root = root};
}

}  // namespace

void Communicator::allGather(const GpuAllGather& call, CUstream_st* stream) {
  State& s = *state_;
  s.validate(call);
  const std::lock_guard lock(s.calls);
  const OnDevice here(s.device);
  if (size() == 1 || s.chooseForParts() == Choice::kDirect) return s.direct(call, stream);
  const State::Told told = s.told(call);
  s.dispatch(told, stream, [&](uint64_t number) {
    if (call.count == 0) return;
    s.follow(stream);
    const size_t bytes = call.count * sizeOf(call.dtype);
    const int unit = unitOf(sizeOf(call.dtype));
    s.push(movingCall(call.input, call.output, bytes, unit, kEverybody, told.timeout, number),
           gatherKernel(unit), unitBytes(unit), stream);
  });
}

void Communicator::broadcast(const GpuBroadcast& call, CUstream_st* stream) {
  State& s = *state_;
  s.validate(call);
  const std::lock_guard lock(s.calls);
  const OnDevice here(s.device);
  if (size() > 1 && s.chooseForParts() == Choice::kDirect) return s.direct(call, stream);
  const State::Told told = s.told(call);
  s.dispatch(told, stream, [&](uint64_t number) {
    if (call.count == 0 || size() == 1) return;
    s.follow(stream);
    const size_t bytes = call.count * sizeOf(call.dtype);
    const int unit = unitOf(sizeOf(call.dtype));
    RankCall of_rank =
        movingCall(call.data, call.data, bytes, unit, call.root, told.timeout, number);
    of_rank.scatter = takesTwoHops(s.tuning, bytes, size());
    s.push(of_rank, gatherKernel(unit), unitBytes(unit), stream);
  });
}

}  // namespace ringreduce::cuda
