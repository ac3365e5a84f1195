// The direct schedule in a CUDA stream: its steps as stream waits, stream writes and kernels.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "cuda/communicator/host_communicator_state.h"
#include "cuda/cuda_errors.h"
#include "cuda/gpu_device.h"
#include "cuda/kernels/direct_schedule.h"

namespace ringreduce::cuda {

// ---- steps into a stream

// Performs this rank's steps of a call.
struct HostCommunicator::State::Turn {
  using Step = const ScheduleStep&;
  std::function<void(Step)> stage, lead;
  std::function<DeliverCall(Step)> deliver;
  std::function<void(Step)> look = {};
  uint32_t ready = kInHalf;  // what this rank tells its leaders
};

void HostCommunicator::State::put(const std::vector<ScheduleStep>& steps, const Turn& turn,
                                  cudaStream_t stream) {
  using Do = ScheduleStep::Do;
  const auto address = [](uint32_t* word) { return reinterpret_cast<CUdeviceptr>(word); };
  const auto wordOf = [&](const ScheduleStep& step) {
    HostState& at = *stateOnDevice(waiterOf(step));
    return address(&at.words[wordIndex(step, group->size())].word);
  };
  const auto write = [&](CUdeviceptr word, uint32_t value) {
    cuda::check(driver().streamWriteValue32(stream, word, value, CU_STREAM_WRITE_VALUE_DEFAULT),
                "put a write into a stream");
  };
  const CUdeviceptr busy = address(&stateOnDevice(group->rank())->busy);
  for (const ScheduleStep& step : steps) {
    switch (step.what) {
      case Do::kBegin:
        write(busy, 1);
        break;
      case Do::kStage:
        turn.stage(step);
        break;
      case Do::kSet:
        write(wordOf(step), step.word == Word::kReady ? turn.ready : 1);
        break;
      case Do::kLook:
        turn.look(step);
        break;
      case Do::kTake:
        write(wordOf(step), 0);
        break;
      case Do::kAwait:
        cuda::check(driver().streamWaitValue32(stream, wordOf(step), 1, CU_STREAM_WAIT_VALUE_GEQ),
                    "put a wait into a stream");
        break;
      case Do::kLead:
        turn.lead(step);
        break;
      case Do::kDeliver: {
        const DeliverCall call = turn.deliver(step);
        const int blocks = call.from ? blocksToMove(call.bytes, facts.multiprocessors) : 1;
        launch(deliverKernel(), blocks, &call, false, stream);
        break;
      }
      case Do::kEnd:
        write(busy, 0);
        break;
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

// Where this call's tensors are: located, if all peers map them by now.
LookCall HostCommunicator::State::lookCall(const GpuAllReduce& call, const Location& here,
                                           uint64_t number) const {
  const int me = group->rank();
  LookCall look{.rank = me,
                .size = group->size(),
                .ready = nullptr,
                .told = {},
                .half = {},
                .input = nullptr,
                .output = nullptr,
                .bytes = call.count * sizeOf(call.dtype),
                .begin = 0,
                .what = here.what,
                .table = comm.table,
                .found = foundOnDevice(),
                .abort = {},
                .local = localOnDevice(),
                .trouble = comm.trouble,
                .operation = number};
  if (here.in.segment != 0) look.input = static_cast<const std::byte*>(call.input);
  if (here.out.segment != 0) look.output = static_cast<std::byte*>(call.output);
  for (int r = 0; r < look.size; ++r) {
    look.told[r] = stateOnDevice(r)->told;
    look.abort[r] = &stateOnDevice(r)->abort;
  }
  return look;
}

void HostCommunicator::State::direct(const GpuAllReduce& call, cudaStream_t stream) {
  const int me = group->rank(), size = group->size();
  const size_t width = sizeOf(call.dtype);
  Location here = locationOf(call, stream, /*later=*/false);
  for (Place* place : {&here.in, &here.out})
    if (place->segment != 0 && !board->isMapped(*place)) *place = {};
  const auto put_all = [&](uint64_t number) {
    const uint32_t ready = locations->tell(here, number, captureOf(stream).has_value());
    const bool stages = here.in.segment == 0, returns = here.out.segment == 0;
    LookCall look = lookCall(call, here, number);
    const auto stage_piece = [&](const ScheduleStep& step) {
      stage(call, step.piece.begin, stagedAt(step.half).base[me], step.piece.size, stream);
    };
    const auto look_at = [&](const ScheduleStep& step) {
      if (step.piece.size == 0) return;
      const StagedAt halves = stagedAt(step.half);
      std::copy_n(halves.base, size, look.half);
      look.begin = step.piece.begin * width;
      look.ready = &stateOnDevice(me)->words[wordIndex(Word::kReady, step.half, 0, size)];
      launch(lookKernel(), 1, &look, false, stream);
    };
    const auto lead = [&](const ScheduleStep& step) {
      if (step.elements.size == 0) return;
      const DirectCall adds{.size = size,
                            .sinks = size,
                            .chunk = Cut{call.count, size}.chunkSize(),
                            .begin = step.elements.begin,
                            .elements = step.elements.size,
                            .first = step.piece.begin,
                            .tensors = {},
                            .arithmetic = arithmeticOf(call.dtype, call.op, call.factor),
                            .abort = &stateOnDevice(me)->abort,
                            .found = foundOnDevice()};
      launch(kernelsOf(call.dtype).direct,
             blocksToMove(step.elements.size * width, facts.multiprocessors), &adds, false, stream);
    };
    const auto deliver = [&](const ScheduleStep& step) {
      DeliverCall sums = deliverCall(call.output, call.count * width, call.dtype);
      if (returns) {
        sums.from = stagedAt(step.half).base[me];
        sums.to += step.piece.begin * width;
        sums.bytes = step.piece.size * width;
      }
      return sums;
    };
    const size_t most = halfOfStaging() / width / kChunkElements * kChunkElements;
    const std::vector<Span> pieces = piecesOf(call.count, most);
    const bool shared = call.count * width >= tuning.shared_lead;
    put(directSchedule(me, size, pieces, schedules, shared, stages),
        {.stage = stage_piece, .lead = lead, .deliver = deliver, .look = look_at, .ready = ready},
        stream);
    schedules += pieces.size();
  };
  dispatch(told(call, Choice::kDirect), stream, put_all);
}

// ---- the other calls, always through the staging memory

size_t HostCommunicator::State::halfOfStaging() const {
  return staging->bytes() / kHalves;
}

StagedAt HostCommunicator::State::stagedAt(int half) const {
  StagedAt staged{.rank = group->rank(),
                  .size = group->size(),
                  .base = {},
                  .abort = &stateOnDevice(group->rank())->abort};
  for (int r = 0; staging && r < staged.size; ++r)
    staged.base[r] = staging->at(r) + static_cast<size_t>(half) * halfOfStaging();
  return staged;
}

void HostCommunicator::State::putOwn(const std::vector<Span>& pieces, int root, const Turn& turn,
                                     cudaStream_t stream) {
  put(ownSchedule(group->rank(), group->size(), pieces, schedules, root), turn, stream);
  schedules += pieces.size();
}

void HostCommunicator::State::direct(const GpuReduceScatter& call, cudaStream_t stream) {
  const size_t width = sizeOf(call.dtype), ranks = static_cast<size_t>(group->size());
  const auto stage_parts = [&](const ScheduleStep& step) {
    const StagedAt staged = stagedAt(step.half);
    stageParts(staged.size, call.count, step.piece, [&](size_t from, size_t to, size_t count) {
      stage(call, from, staged.base[staged.rank] + to * width, count, stream);
    });
  };
  const auto lead = [&](const ScheduleStep& step) {
    const DirectCall adds = addParts(stagedAt(step.half), call.output, call.count, step.piece,
                                     width, arithmeticOf(call.dtype, call.op, call.factor));
    launch(kernelsOf(call.dtype).direct,
           blocksToMove(step.piece.size * width, facts.multiprocessors), &adds, false, stream);
  };
  const auto deliver = [&](const ScheduleStep&) {
    return deliverCall(call.output, call.count * width, call.dtype);
  };
  dispatch(told(call), stream, [&](uint64_t) {
    const size_t most = halfOfStaging() / ranks / width / kChunkElements * kChunkElements;
    putOwn(piecesOf(call.count, most), kEverybody,
           {.stage = stage_parts, .lead = lead, .deliver = deliver}, stream);
  });
}

void HostCommunicator::State::direct(const GpuAllGather& call, cudaStream_t stream) {
  const size_t part = call.count * sizeOf(call.dtype);
  const auto gather = [&](int half, Span piece) {
    carry(gatherParts(stagedAt(half), call.input, call.output, part, piece), call.dtype, stream);
  };
  const auto stage_part = [&](const ScheduleStep& step) {
    const StagedAt staged = stagedAt(step.half);
    const auto* from = static_cast<const std::byte*>(call.input) + step.piece.begin;
    carry(carryOne(staged, from, staged.base[staged.rank], step.piece.size), call.dtype, stream);
  };
  const auto deliver = [&](const ScheduleStep&) {
    return deliverCall(call.output, static_cast<size_t>(group->size()) * part, call.dtype);
  };
  dispatch(told(call), stream, [&](uint64_t) {
    if (group->size() == 1) return gather(0, {0, part});
    putOwn(piecesOf(part, halfOfStaging() / kLine * kLine), kEverybody,
           {.stage = stage_part,
            .lead = [&](const ScheduleStep& step) { gather(step.half, step.piece); },
            .deliver = deliver},
           stream);
  });
}

void HostCommunicator::State::direct(const GpuBroadcast& call, cudaStream_t stream) {
  const size_t all = call.count * sizeOf(call.dtype);
  const auto move = [&](const ScheduleStep& step) {
    const StagedAt staged = stagedAt(step.half);
    std::byte* const data = static_cast<std::byte*>(call.data) + step.piece.begin;
    std::byte* const roots = staged.base[call.root];
    const bool stages = staged.rank == call.root;
    carry(carryOne(staged, stages ? data : roots, stages ? roots : data, step.piece.size),
          call.dtype, stream);
  };
  // The root's own elements are never written.
  const auto deliver = [&](const ScheduleStep&) {
    return deliverCall(call.data, group->rank() == call.root ? 0 : all, call.dtype);
  };
  dispatch(told(call), stream, [&](uint64_t) {
    putOwn(piecesOf(all, halfOfStaging() / kLine * kLine), call.root,
           {.stage = move, .lead = move, .deliver = deliver}, stream);
  });
}

}  // namespace ringreduce::cuda
