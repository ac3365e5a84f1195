// The direct schedule in a CUDA stream: its steps as stream waits, stream writes and kernels.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <functional>

#include "base/bytes.h"
#include "base/error.h"
#include "cuda/communicator/host_communicator_state.h"
#include "cuda/cuda_errors.h"
#include "cuda/gpu_device.h"
#include "cuda/kernels/direct_schedule.h"

namespace ringreduce::cuda {

// ---- steps into a stream

// Performs this rank's steps of one schedule.
struct HostCommunicator::State::Turn {
  std::function<void()> stage;
  std::function<void(Span elements)> lead;
  DeliverCall deliver;
};

void HostCommunicator::State::put(const std::vector<ScheduleStep>& steps, const Turn& turn,
                                  cudaStream_t stream) {
  using Do = ScheduleStep::Do;
  const int me = group->rank(), size = group->size();
  const auto address = [](uint32_t* word) { return reinterpret_cast<CUdeviceptr>(word); };
  const auto wordOf = [&](const ScheduleStep& step) {
    HostState& at = *stateOnDevice(waiterOf(step.word, step.leader, step.rank));
    return address(
        &at.words[wordIndex(step.word, setterOf(step.word, step.leader, step.rank), size)].word);
  };
  const auto write = [&](CUdeviceptr word, uint32_t value) {
    cuda::check(driver().streamWriteValue32(stream, word, value, CU_STREAM_WRITE_VALUE_DEFAULT),
                "put a write into a stream");
  };
  const CUdeviceptr busy = address(&stateOnDevice(me)->busy);
  for (const ScheduleStep& step : steps) {
    switch (step.what) {
      case Do::kBegin:
        write(busy, 1);
        break;
      case Do::kStage:
        turn.stage();
        break;
      case Do::kSet:
        write(wordOf(step), 1);
        break;
      case Do::kTake:
        write(wordOf(step), 0);
        break;
      case Do::kAwait:
        cuda::check(driver().streamWaitValue32(stream, wordOf(step), 1, CU_STREAM_WAIT_VALUE_GEQ),
                    "put a wait into a stream");
        break;
      case Do::kLead:
        turn.lead(step.elements);
        break;
      case Do::kDeliver: {
        const int blocks =
            turn.deliver.from ? blocksToMove(turn.deliver.bytes, facts.multiprocessors) : 1;
        launch(deliverKernel(), blocks, &turn.deliver, false, stream);
        write(busy, 0);
        break;
      }
    }
  }
}

// The end of a call whose output is in place.
DeliverCall HostCommunicator::State::deliverCall(void* output, size_t bytes, DType dtype) const {
  HostState& own = *stateOnDevice(group->rank());
  auto* at = static_cast<std::byte*>(output);
  return {.from = nullptr,
          .to = at,
          .bytes = 0,
          .abort = &own.abort,
          .delivered = &own.delivered,
          .local = localOnDevice(),
          .output = at,
          .output_bytes = bytes,
          .poison = poisonOf(dtype)};
}

void HostCommunicator::State::carry(const CarryCall& call, DType dtype, cudaStream_t stream) {
  if (call.places == 0 || call.bytes == 0) return;
  launch(carryKernel(unitOf(sizeOf(dtype))), blocksToMove(call.bytes, facts.multiprocessors), &call,
         false, stream);
}

// ---- all_reduce

std::optional<HostCommunicator::State::Places> HostCommunicator::State::placesOf(
    const GpuAllReduce& call, cudaStream_t stream) {
  const size_t bytes = call.count * sizeOf(call.dtype);
  const auto find = [&](const void* p) -> Registered* {
    const auto at = reinterpret_cast<uintptr_t>(p);
    auto entry = registered.upper_bound(at);
    if (entry == registered.begin()) return nullptr;
    --entry;
    const bool inside = at - entry->first + bytes <= entry->second.bytes;
    return inside ? &entry->second : nullptr;
  };
  // Inputs to be scaled must be copied anyway.
  if (!call.registered || call.op == ReduceOp::kPremulSum) return std::nullopt;
  Registered *in = find(call.input), *out = find(call.output);
  if (!in || !out) return std::nullopt;
  if (captureOf(stream)) in->is_captured = out->is_captured = true;
  Places found;
  const auto offset = [&](const Registered& r, const void* p) {
    return static_cast<size_t>(static_cast<const std::byte*>(p) - r.buffer->at(group->rank()));
  };
  const size_t in_at = offset(*in, call.input), out_at = offset(*out, call.output);
  for (uint64_t word : {in->number + 1, in_at + 1, out->number + 1, out_at + 1})
    found.hash = mixed(found.hash, word);
  for (int r = 0; r < group->size(); ++r) {
    found.in.push_back(in->buffer->at(r) + in_at);
    found.out.push_back(out->buffer->at(r) + out_at);
  }
  return found;
}

void HostCommunicator::State::direct(const GpuAllReduce& call, cudaStream_t stream) {
  const std::optional<Places> registered_at = placesOf(call, stream);
  const bool staged = !registered_at;
  Places buffers = registered_at.value_or(Places{});
  if (staged) {
    for (int r = 0; r < group->size(); ++r) buffers.in.push_back(staging->at(r));
    buffers.out = buffers.in;
  }
  const int me = group->rank(), size = group->size();
  const auto mine = static_cast<size_t>(me);
  const size_t width = sizeOf(call.dtype);
  // A part of the message that goes through the schedule at once.
  const auto put = [&](size_t first, size_t count) {
    const auto lead = [&](Span elements) {
      if (elements.size == 0) return;
      DirectCall adds{.size = size,
                      .sinks = size,
                      .chunk = Cut{call.count, size}.chunkSize(),
                      .begin = first + elements.begin,
                      .elements = elements.size,
                      .first = first,
                      .inputs = {},
                      .outputs = {},
                      .arithmetic = arithmeticOf(call.dtype, call.op, call.factor),
                      .abort = &stateOnDevice(me)->abort};
      std::copy(buffers.in.begin(), buffers.in.end(), adds.inputs);
      std::copy(buffers.out.begin(), buffers.out.end(), adds.outputs);
      launch(kernelsOf(call.dtype).direct,
             blocksToMove(elements.size * width, facts.multiprocessors), &adds, false, stream);
    };
    DeliverCall deliver = deliverCall(call.output, call.count * width, call.dtype);
    if (staged) {
      deliver.from = buffers.out[mine];
      deliver.to += first * width;
      deliver.bytes = count * width;
    }
    const bool shared = count * width >= tuning.shared_lead;
    State::put(directSchedule(me, size, count, schedules++, shared, staged),
               {.stage = [&] { stage(call, first, buffers.in[mine], count, stream); },
                .lead = lead,
                .deliver = deliver},
               stream);
  };
  dispatch(told(call, mixed(static_cast<uint64_t>(Choice::kDirect), buffers.hash)), stream,
           [&](uint64_t) {
             if (call.count == 0) return;
             if (!staged) return put(0, call.count);
             const size_t most = staging->bytes() / width / kChunkElements * kChunkElements;
             for (size_t first = 0; first < call.count; first += most)
               put(first, std::min(most, call.count - first));
           });
}

// ---- the other calls, always through the staging memory

StagedAt HostCommunicator::State::stagedAt() const {
  StagedAt staged{.rank = group->rank(),
                  .size = group->size(),
                  .base = {},
                  .abort = &stateOnDevice(group->rank())->abort};
  for (int r = 0; staging && r < staged.size; ++r) staged.base[r] = staging->at(r);
  return staged;
}

namespace {

// Pieces of [0, all) of at most `most` each.
template <class Put>
void inPieces(size_t all, size_t most, Put put) {
  for (size_t i = 0; i * most < all; ++i) put(piece(all, most, i));
}

}  // namespace

void HostCommunicator::State::direct(const GpuReduceScatter& call, cudaStream_t stream) {
  const StagedAt staged = stagedAt();
  const size_t width = sizeOf(call.dtype);
  std::byte* const own = staged.base[staged.rank];
  const auto put = [&](Span piece) {
    const auto stage_all = [&] {
      stageParts(staged.size, call.count, piece, [&](size_t from, size_t to, size_t count) {
        stage(call, from, own + to * width, count, stream);
      });
    };
    const auto lead = [&](Span) {
      const DirectCall adds = addParts(staged, call.output, call.count, piece, width,
                                       arithmeticOf(call.dtype, call.op, call.factor));
      launch(kernelsOf(call.dtype).direct, blocksToMove(piece.size * width, facts.multiprocessors),
             &adds, false, stream);
    };
    State::put(ownSchedule(staged.rank, staged.size, kEverybody),
               {.stage = stage_all,
                .lead = lead,
                .deliver = deliverCall(call.output, call.count * width, call.dtype)},
               stream);
  };
  dispatch(told(call), stream, [&](uint64_t) {
    const size_t each = staging->bytes() / static_cast<size_t>(staged.size) / width;
    inPieces(call.count, each / kChunkElements * kChunkElements, put);
  });
}

void HostCommunicator::State::direct(const GpuAllGather& call, cudaStream_t stream) {
  const StagedAt staged = stagedAt();
  const size_t part = call.count * sizeOf(call.dtype);
  const auto gather = [&](Span piece) {
    carry(gatherParts(staged, call.input, call.output, part, piece), call.dtype, stream);
  };
  const auto put = [&](Span piece) {
    const auto* from = static_cast<const std::byte*>(call.input) + piece.begin;
    State::put(
        ownSchedule(staged.rank, staged.size, kEverybody),
        {.stage =
             [&] {
               carry(carryOne(staged, from, staged.base[staged.rank], piece.size), call.dtype,
                     stream);
             },
         .lead = [&](Span) { gather(piece); },
         .deliver = deliverCall(call.output, static_cast<size_t>(staged.size) * part, call.dtype)},
        stream);
  };
  dispatch(told(call), stream, [&](uint64_t) {
    if (staged.size == 1) return gather({0, part});
    inPieces(part, staging->bytes() / kLine * kLine, put);
  });
}

void HostCommunicator::State::direct(const GpuBroadcast& call, cudaStream_t stream) {
  const StagedAt staged = stagedAt();
  const size_t all = call.count * sizeOf(call.dtype);
  std::byte* const roots = staged.base[call.root];
  const auto put = [&](Span piece) {
    std::byte* const data = static_cast<std::byte*>(call.data) + piece.begin;
    // The root's own elements are never written.
    State::put(
        ownSchedule(staged.rank, staged.size, call.root),
        {.stage = [&] { carry(carryOne(staged, data, roots, piece.size), call.dtype, stream); },
         .lead =
             [&](Span) { carry(carryOne(staged, roots, data, piece.size), call.dtype, stream); },
         .deliver = deliverCall(call.data, staged.rank == call.root ? 0 : all, call.dtype)},
        stream);
  };
  dispatch(told(call), stream,
           [&](uint64_t) { inPieces(all, staging->bytes() / kLine * kLine, put); });
}

// ---- registered buffers

std::string HostCommunicator::registerBuffer(void* data, size_t bytes,
                                             std::shared_ptr<void> owner) {
  State& s = *state_;
  const std::lock_guard lock(s.calls);
  const OnDevice here(s.device);
  Registration made = cuda::registerBuffer(*s.group, *s.memory, data, bytes);
  if (!made.buffer) return made.refusal;
  s.registered[reinterpret_cast<uintptr_t>(data)] = {.buffer = std::move(made.buffer),
                                                     .bytes = bytes,
                                                     .number = s.registrations++,
                                                     .owner = std::move(owner)};
  return "";
}

std::vector<std::shared_ptr<void>> HostCommunicator::unregisterBuffers(const Unused& unused) {
  State& s = *state_;
  const std::lock_guard lock(s.calls);
  std::map<uint64_t, uintptr_t> by_number;  // which is a buffer's name on all ranks
  for (const auto& [at, one] : s.registered) by_number[one.number] = at;
  std::vector<uintptr_t> agreed;
  constexpr size_t kAtOnce = 64;
  struct Votes {
    struct {
      uint64_t number;
      bool unused;
    } of[kAtOnce];
  };
  for (auto next = by_number.begin(); next != by_number.end();) {
    std::vector<uintptr_t> asked;
    Votes mine{};
    for (; next != by_number.end() && asked.size() < kAtOnce; ++next) {
      const State::Registered& one = s.registered.at(next->second);
      mine.of[asked.size()] = {one.number, !one.is_captured && unused(one.owner)};
      asked.push_back(next->second);
    }
    const std::vector<Votes> all = gatherEach(*s.group, mine);
    for (size_t i = 0; i < asked.size(); ++i)
      if (std::ranges::all_of(all, [&](const Votes& one) {
            return one.of[i].unused && one.of[i].number == mine.of[i].number;
          }))
        agreed.push_back(asked[i]);
  }
  if (agreed.empty()) return {};
  s.watchdog->wait(kNever);
  // No rank may still use them.
  s.group->run({Barrier{}});
  std::vector<std::shared_ptr<void>> given_back;
  for (const uintptr_t at : agreed) {
    given_back.push_back(std::move(s.registered.at(at).owner));
    s.registered.erase(at);
  }
  // Their owners may free them after this: no rank may still map them.
  s.group->run({Barrier{}});
  return given_back;
}

}  // namespace ringreduce::cuda
