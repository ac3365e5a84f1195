// The calls of the backend that only move bytes: collectives, barriers, sends and receives. Torch's
// calls are checked and turned into operations.
//
// A check that fails here raises ValueError before anything is sent, and the group stays usable.
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "base/error.h"
#include "torch/arguments.h"
#include "torch/backend.h"
#include "torch/errors.h"
#include "torch/gpu_backend.h"

namespace ringreduce {
namespace {

using Use = Staged::Use;

// all_gather_into_tensor.  `written`: all outputs of the whole call.
Operation gatherInto(const at::Tensor& output, const at::Tensor& input, const OutputMemory& written,
                     int rank, int world_size, std::chrono::milliseconds timeout,
                     const char* call) {
  requireDense(input, call);
  requireLike(output, input.numel() * world_size, input, call,
              "the output (the input's size times the world size)");
  const DType dtype = dtypeOf(input, call);
  const at::Tensor* in_place = isPartOf(input, output, rank) ? &output : nullptr;
  StagedList staged;
  AllGather gather{.input = staged.add(written.copyIfShared(input, in_place), Use::kRead, call),
                   .dtype = dtype};
  gather.counts = equalCounts(countOf(input), world_size);
  gather.outputs =
      partsOf<void*>(staged.add(output, Use::kWrite, call), gather.counts, sizeOf(dtype));
  return {std::move(gather), timeoutOf(timeout),
          [staged = std::move(staged)] { staged.giveBack(); }};
}

// all_gather into a list: rank r's elements into outputs[r], whatever their number.  `written`: all
// outputs of the whole call.
Operation gatherList(const Tensors& outputs, const at::Tensor& input, const OutputMemory& written,
                     int rank, std::chrono::milliseconds timeout, const char* call) {
  requireDense(input, call);
  const DType dtype = dtypeOf(input, call);
  StagedList staged;
  AllGather gather{.input = nullptr, .dtype = dtype};
  for (size_t r = 0; r < outputs.size(); ++r) {
    const bool own = static_cast<int>(r) == rank;
    requireDense(outputs[r], call);
    requireLike(outputs[r], own ? input.numel() : outputs[r].numel(), input, call,
                own ? "this rank's own output" : "each output");
    gather.counts.push_back(countOf(outputs[r]));
    gather.outputs.push_back(staged.add(outputs[r], Use::kWrite, call));
  }
  const at::Tensor& own = outputs.at(static_cast<size_t>(rank));
  gather.input = staged.add(written.copyIfShared(input, isPartOf(input, own, 0) ? &own : nullptr),
                            Use::kRead, call);
  return {std::move(gather), timeoutOf(timeout),
          [staged = std::move(staged)] { staged.giveBack(); }};
}

// gather.  `outputs`: one for each rank at the root, none elsewhere.
Operation gatherTo(const Tensors& outputs, const at::Tensor& input, int rank,
                   const c10d::GatherOptions& options, const char* call) {
  StagedList staged;
  Gather gather{.input = nullptr,
                .outputs = {},
                .count = countOf(input),
                .dtype = dtypeOf(input, call),
                .root = static_cast<int>(options.rootRank)};
  for (const at::Tensor& output : outputs) {
    requireLike(output, input.numel(), input, call, "each output");
    gather.outputs.push_back(staged.add(output, Use::kWrite, call));
  }
  const at::Tensor own = outputs.empty() ? at::Tensor() : outputs.at(static_cast<size_t>(rank));
  const bool in_place = own.defined() && isPartOf(input, own, 0);
  gather.input = staged.add(
      OutputMemory(outputs, call).copyIfShared(input, in_place ? &own : nullptr), Use::kRead, call);
  return {std::move(gather), timeoutOf(options.timeout),
          [staged = std::move(staged)] { staged.giveBack(); }};
}

// Elements by rank where a tensor's first dimension is split; equal parts where no sizes are given.
std::vector<size_t> splitCounts(const at::Tensor& tensor, const std::vector<int64_t>& sizes,
                                int world_size, const char* call, const char* what) {
  if (sizes.empty()) {
    if (tensor.dim() == 0 || tensor.size(0) % world_size != 0)
      refuse(call,
             c10::str("the ", what, "'s first dimension, ", tensor.dim() == 0 ? 0 : tensor.size(0),
                      ", is not a multiple of the world size, ", world_size));
    return equalCounts(countOf(tensor) / static_cast<size_t>(world_size), world_size);
  }
  if (static_cast<int>(sizes.size()) != world_size)
    refuse(call, c10::str(sizes.size(), " ", what, " split sizes in a group of ", world_size));
  int64_t rows = 0;
  for (int64_t size : sizes) {
    if (size < 0) refuse(call, c10::str("a negative ", what, " split size, ", size));
    rows += size;
  }
  const int64_t there = tensor.dim() == 0 ? 0 : tensor.size(0);
  if (rows != there)
    refuse(call, c10::str("the ", what, " split sizes add up to ", rows,
                          ", the first dimension is ", there));
  const size_t row = there == 0 ? 0 : countOf(tensor) / static_cast<size_t>(there);
  std::vector<size_t> counts;
  for (int64_t size : sizes) counts.push_back(static_cast<size_t>(size) * row);
  return counts;
}

}  // namespace

// Survivors agree which broadcasts have failed, so all go on to the same root.
Backend::WorkPtr Backend::broadcastOfCopies(Group& group, const at::Tensor& tensor,
                                            const c10d::BroadcastOptions& options) {
  const int rank = group.rank();
  const auto from = [&](int root) {
    // What a root sent before it was lost must not remain in parts of the tensor.
    const at::Tensor data = root == rank ? tensor : at::empty_like(tensor);
    const Staged staged(data, root == rank ? Use::kRead : Use::kWrite, "broadcast");
    Operation operation{Broadcast{.data = staged.data(),
                                  .count = countOf(data),
                                  .dtype = dtypeOf(data, "broadcast"),
                                  .root = root},
                        timeoutOf(options.timeout), [staged] { staged.giveBack(); }};
    group.run(std::move(operation));
    if (root != rank) at::Tensor(tensor).copy_(data);
  };
  std::vector<int> roots{static_cast<int>(options.rootRank)};
  for (int r = 0; r < group.size(); ++r)
    if (r != options.rootRank) roots.push_back(r);
  for (const int root : roots) try {
      from(root);
      break;
    } catch (const Error& error) {
      if (error.kind() != Failure::kPeerLost || group.failed() || root == roots.back()) throw;
    }
  return c10::make_intrusive<WorkList>(rank, std::vector<WorkPtr>());
}

Backend::WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  if (const auto gpu = gpuFor(tensors)) return gpu->broadcast(tensors, options);
  return translated([&]() -> WorkPtr {
    const std::shared_ptr<Group> group = this->group();
    const at::Tensor& tensor = onlyOne(tensors, "broadcast");
    if (roots_move_) return broadcastOfCopies(*group, tensor, options);
    const bool root = options.rootRank == group->rank();
    const Staged staged(tensor, root ? Use::kRead : Use::kWrite, "broadcast");
    return start(*group, c10d::OpType::BROADCAST, "ringreduce:broadcast", tensors, tensors,
                 {Broadcast{.data = staged.data(),
                            .count = countOf(tensor),
                            .dtype = dtypeOf(tensor, "broadcast"),
                            .root = static_cast<int>(options.rootRank)},
                  timeoutOf(options.timeout), [staged] { staged.giveBack(); }},
                 options.asyncOp);
  });
}

Backend::WorkPtr Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                    const c10d::AllgatherOptions& options) {
  if (const auto gpu = gpuFor(inputs)) return gpu->allgather(outputs, inputs, options);
  return translated([&] {
    const std::shared_ptr<Group> group = this->group();
    const at::Tensor& input = onlyOne(inputs, "all_gather");
    const Tensors& list =
        onlyList(outputs, static_cast<size_t>(group->size()), "all_gather", "output");
    return start(*group, c10d::OpType::ALLGATHER, "ringreduce:all_gather", inputs, list,
                 gatherList(list, input, OutputMemory(list, "all_gather"), group->rank(),
                            options.timeout, "all_gather"),
                 options.asyncOp);
  });
}

Backend::WorkPtr Backend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) {
  if (const auto gpu = gpuFor(inputs)) return gpu->allgather_coalesced(outputs, inputs, options);
  constexpr auto kCall = "all_gather_coalesced";
  return translated([&] {
    const std::shared_ptr<Group> group = this->group();
    requireSome(inputs, kCall);
    if (outputs.size() != static_cast<size_t>(group->size()))
      refuse(kCall, c10::str("needs ", group->size(), " lists of outputs, one for each rank, not ",
                             outputs.size()));
    Job job{c10d::OpType::ALLGATHER_COALESCED, "ringreduce:all_gather", inputs};
    for (const Tensors& list : outputs) {
      if (list.size() != inputs.size())
        refuse(kCall,
               c10::str("a list of ", list.size(), " outputs for ", inputs.size(), " inputs"));
      job.outputs.insert(job.outputs.end(), list.begin(), list.end());
    }
    const OutputMemory written(job.outputs, kCall);
    for (size_t i = 0; i < inputs.size(); ++i) {
      Tensors by_rank;
      for (const Tensors& list : outputs) by_rank.push_back(list[i]);
      job.operations.push_back(
          gatherList(by_rank, inputs[i], written, group->rank(), options.timeout, kCall));
    }
    return start(*group, std::move(job), options.asyncOp);
  });
}

Backend::WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::AllgatherOptions& options) {
  if (const auto gpu = gpuFor(input)) return gpu->_allgather_base(output, input, options);
  constexpr auto kCall = "all_gather_into_tensor";
  return translated([&] {
    const std::shared_ptr<Group> group = this->group();
    return start(*group, c10d::OpType::_ALLGATHER_BASE, "ringreduce:all_gather", {input}, {output},
                 gatherInto(output, input, OutputMemory({output}, kCall), group->rank(),
                            group->size(), options.timeout, kCall),
                 options.asyncOp);
  });
}

Backend::WorkPtr Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& options) {
  if (const auto gpu = gpuFor(inputs))
    return gpu->allgather_into_tensor_coalesced(outputs, inputs, options);
  constexpr auto kCall = "all_gather_into_tensor_coalesced";
  return translated([&] {
    const std::shared_ptr<Group> group = this->group();
    requirePairs(outputs, inputs, kCall);
    Job job{c10d::OpType::COALESCED, "ringreduce:all_gather_into_tensor_coalesced", inputs,
            outputs};
    const OutputMemory written(outputs, kCall);
    for (size_t i = 0; i < inputs.size(); ++i)
      job.operations.push_back(gatherInto(outputs[i], inputs[i], written, group->rank(),
                                          group->size(), options.timeout, kCall));
    return start(*group, std::move(job), options.asyncOp);
  });
}

Backend::WorkPtr Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                 const c10d::GatherOptions& options) {
  if (const auto gpu = gpuFor(inputs)) return gpu->gather(outputs, inputs, options);
  return translated([&] {
    const std::shared_ptr<Group> group = this->group();
    const at::Tensor& input = onlyOne(inputs, "gather");
    const bool root = options.rootRank == group->rank();
    if (!root && !outputs.empty())
      refuse("gather", c10::str("outputs at rank ", group->rank(),
                                ", which is not the destination, rank ", options.rootRank));
    Tensors list;
    if (root) list = onlyList(outputs, static_cast<size_t>(group->size()), "gather", "output");
    return start(*group, c10d::OpType::GATHER, "ringreduce:gather", inputs, list,
                 gatherTo(list, input, group->rank(), options, "gather"), options.asyncOp);
  });
}

Backend::WorkPtr Backend::gather_single(at::Tensor& output, at::Tensor& input,
                                        const c10d::GatherOptions& options) {
  constexpr auto kCall = "gather_single";
  return translated([&] {
    const std::shared_ptr<Group> group = this->group();
    const int size = group->size();
    Tensors inputs{input};
    Tensors results;
    Tensors list;
    if (options.rootRank == group->rank()) {
      requireDense(output, kCall, input.device());
      requireLike(output, input.numel() * size, input, kCall,
                  "the output (the input's size times the world size)");
      if (!output.is_contiguous()) refuse(kCall, "the output must be contiguous");
      results = {output};
      list = output.view({size, input.numel()}).unbind();
    }
    if (const auto gpu = gpuFor(input)) {
      std::vector<Tensors> outputs;
      if (!list.empty()) outputs.push_back(list);
      return gpu->gather(outputs, inputs, options);
    }
    return start(*group, c10d::OpType::GATHER, "ringreduce:gather", inputs, results,
                 gatherTo(list, input, group->rank(), options, kCall), options.asyncOp);
  });
}

Backend::WorkPtr Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                  const c10d::ScatterOptions& options) {
  if (const auto gpu = gpuFor(outputs)) return gpu->scatter(outputs, inputs, options);
  return translated([&] {
    const std::shared_ptr<Group> group = this->group();
    const at::Tensor& output = onlyOne(outputs, "scatter");
    const bool root = options.rootRank == group->rank();
    StagedList staged;
    Scatter scatter{.inputs = {},
                    .output = staged.add(output, Use::kWrite, "scatter"),
                    .count = countOf(output),
                    .dtype = dtypeOf(output, "scatter"),
                    .root = static_cast<int>(options.rootRank)};
    if (!root && !inputs.empty())
      refuse("scatter", c10::str("inputs at rank ", group->rank(),
                                 ", which is not the source, rank ", options.rootRank));
    Tensors list;
    if (root) list = onlyList(inputs, static_cast<size_t>(group->size()), "scatter", "input");
    const OutputMemory written(outputs, "scatter");
    for (size_t r = 0; r < list.size(); ++r) {
      requireLike(list[r], output.numel(), output, "scatter", "each input");
      const bool in_place = static_cast<int>(r) == group->rank() && isPartOf(output, list[r], 0);
      scatter.inputs.push_back(staged.add(
          written.copyIfShared(list[r], in_place ? &output : nullptr), Use::kRead, "scatter"));
    }
    return start(*group, c10d::OpType::SCATTER, "ringreduce:scatter", list, outputs,
                 {std::move(scatter), timeoutOf(options.timeout),
                  [staged = std::move(staged)] { staged.giveBack(); }},
                 options.asyncOp);
  });
}

Backend::WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                        std::vector<int64_t>& output_splits,
                                        std::vector<int64_t>& input_splits,
                                        const c10d::AllToAllOptions& options) {
  if (const auto gpu = gpuFor(input))
    return gpu->alltoall_base(output, input, output_splits, input_splits, options);
  constexpr auto kCall = "all_to_all_single";
  return translated([&] {
    const std::shared_ptr<Group> group = this->group();
    requireDense(input, kCall);
    requireDense(output, kCall);
    if (!input.is_contiguous())  // in the words of torch's own backends
      refuse(kCall, "Tensors must be contiguous, which the input is not");
    const bool even = input_splits.empty() && output_splits.empty();
    if (input.scalar_type() != output.scalar_type())
      refuse(kCall, c10::str("an input of ", input.scalar_type(), " and an output of ",
                             output.scalar_type()));
    if (even) requireLike(output, input.numel(), input, kCall, "the output (as the input)");
    const DType dtype = dtypeOf(input, kCall);
    StagedList staged;
    AllToAll exchange{
        .inputs = {},
        .outputs = {},
        .send_counts = splitCounts(input, input_splits, group->size(), kCall, "input"),
        .recv_counts = splitCounts(output, output_splits, group->size(), kCall, "output"),
        .even = even,
        .dtype = dtype};
    const auto own = static_cast<size_t>(group->rank());
    if (exchange.send_counts[own] != exchange.recv_counts[own])
      refuse(kCall, c10::str("this rank sends itself ", exchange.send_counts[own],
                             " elements and expects ", exchange.recv_counts[own]));
    exchange.inputs = partsOf<const void*>(
        staged.add(OutputMemory({output}, kCall).copyIfShared(input), Use::kRead, kCall),
        exchange.send_counts, sizeOf(dtype));
    exchange.outputs =
        partsOf<void*>(staged.add(output, Use::kWrite, kCall), exchange.recv_counts, sizeOf(dtype));
    return start(*group, c10d::OpType::ALLTOALL_BASE, "ringreduce:all_to_all", {input}, {output},
                 {std::move(exchange), timeoutOf(options.timeout),
                  [staged = std::move(staged)] { staged.giveBack(); }},
                 options.asyncOp);
  });
}

Backend::WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs,
                                   const c10d::AllToAllOptions& options) {
  if (const auto gpu = gpuFor(inputs)) return gpu->alltoall(outputs, inputs, options);
  constexpr auto kCall = "all_to_all";
  return translated([&] {
    const std::shared_ptr<Group> group = this->group();
    const auto P = static_cast<size_t>(group->size());
    onlyList({inputs}, P, kCall, "input");
    onlyList({outputs}, P, kCall, "output");
    requireDense(inputs[0], kCall);
    StagedList staged;
    AllToAll exchange{.inputs = {},
                      .outputs = {},
                      .send_counts = {},
                      .recv_counts = {},
                      .even = false,
                      .dtype = dtypeOf(inputs[0], kCall)};
    for (size_t r = 0; r < P; ++r) {
      const int64_t own = static_cast<int>(r) == group->rank() ? inputs[r].numel() : -1;
      requireLike(inputs[r], inputs[r].numel(), inputs[0], kCall, "each input");
      requireLike(outputs[r], own >= 0 ? own : outputs[r].numel(), inputs[0], kCall,
                  own >= 0 ? "this rank's own output" : "each output");
      exchange.send_counts.push_back(countOf(inputs[r]));
      exchange.recv_counts.push_back(countOf(outputs[r]));
      exchange.outputs.push_back(staged.add(outputs[r], Use::kWrite, kCall));
    }
    for (const at::Tensor& input : OutputMemory(outputs, kCall).copyIfShared(inputs))
      exchange.inputs.push_back(staged.add(input, Use::kRead, kCall));
    return start(*group, c10d::OpType::ALLTOALL, "ringreduce:all_to_all", inputs, outputs,
                 {std::move(exchange), timeoutOf(options.timeout),
                  [staged = std::move(staged)] { staged.giveBack(); }},
                 options.asyncOp);
  });
}

// ---- barriers

// It also waits for all work in the GPU's current stream and for the calls that communicators
// perform, whether their Works were waited for or not.  torch names a GPU only if its caller does,
// or if the group has no CPU.
Backend::WorkPtr Backend::barrier(const c10d::BarrierOptions& options) {
  return translated([&] {
    const std::shared_ptr<Group> group = this->group();
    const Nanos timeout = timeoutOf(options.timeout);
    if (const GpuPtr gpu = gpuIfAny())
      gpu->drain(*group,
                 options.device && options.device->is_cuda() ? options.device : std::nullopt,
                 timeout > 0 ? timeout : group->timeout(), "did not enter a barrier");
    return start(*group,
                 {.type = c10d::OpType::BARRIER,
                  .title = "ringreduce:barrier",
                  .operations = {{Barrier{}, timeout}}},
                 options.asyncOp);
  });
}

// All absent ranks are always named, so `wait_all_ranks` changes nothing.
void Backend::monitoredBarrier(const c10d::BarrierOptions& options, bool /*wait_all_ranks*/) {
  translated([&] {
    // Here a timeout of 0 is a timeout: a rank that is not there already is late.
    const Nanos timeout = options.timeout.count() == 0 ? 1 : timeoutOf(options.timeout);
    start(*group(),
          {.type = c10d::OpType::BARRIER,
           .title = "ringreduce:monitored_barrier",
           .operations = {{MonitoredBarrier{}, timeout}}},
          /*async=*/false);
  });
}

// ---- sends and receives

namespace {

Message messageOf(const Tensors& tensors, Message::Direction direction, int peer, int tag,
                  const char* call) {
  const at::Tensor& tensor = onlyOne(tensors, call);
  requireTag(tag, call);
  const Staged staged(
      tensor, direction == Message::Direction::kSend ? Staged::Use::kRead : Staged::Use::kWrite,
      call);
  return {.direction = direction,
          .peer = peer,
          .tag = tag,
          .data = staged.data(),
          .count = static_cast<size_t>(tensor.numel()),
          .dtype = dtypeOf(tensor, call),
          .after = [staged] { staged.giveBack(); }};
}

}  // namespace

Backend::WorkPtr Backend::send(Tensors& tensors, int peer, int tag) {
  if (const auto gpu = gpuFor(tensors)) return gpu->send(tensors, peer, tag);
  return translated([&] {
    return startMessage(c10d::OpType::SEND, "ringreduce:send", tensors,
                        messageOf(tensors, Message::Direction::kSend, peer, tag, "send"));
  });
}

Backend::WorkPtr Backend::recv(Tensors& tensors, int peer, int tag) {
  if (const auto gpu = gpuFor(tensors)) return gpu->recv(tensors, peer, tag);
  return translated([&] {
    if (peer < 0)
      refuse("recv",
             "from rank " + std::to_string(peer) + " in a group of " + std::to_string(getSize()));
    return startMessage(c10d::OpType::RECV, "ringreduce:recv", tensors,
                        messageOf(tensors, Message::Direction::kReceive, peer, tag, "recv"));
  });
}

Backend::WorkPtr Backend::recvAnysource(Tensors& tensors, int tag) {
  if (const auto gpu = gpuFor(tensors)) return gpu->recvAnysource(tensors, tag);
  return translated([&] {
    return startMessage(c10d::OpType::RECVANYSOURCE, "ringreduce:recvAnySource", tensors,
                        messageOf(tensors, Message::Direction::kReceive, kAnySource, tag, "recv"));
  });
}

}  // namespace ringreduce
