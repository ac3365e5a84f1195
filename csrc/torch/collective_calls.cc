// The collectives of the backend: torch's calls, checked and turned into operations.
//
// A check that fails here raises ValueError before anything is sent, and the group stays usable.
#include <ATen/core/grad_mode.h>

#include <utility>

#include "base/error.h"
#include "torch/arguments.h"
#include "torch/backend.h"
#include "torch/errors.h"
#include "torch/sparse.h"

namespace ringreduce {
namespace {

using Use = Staged::Use;

size_t countOf(const at::Tensor& tensor) {
  return static_cast<size_t>(tensor.numel());
}

// Elements that a rank's part of `count` has, by rank, where parts are equal.
std::vector<size_t> equalCounts(size_t count, int world_size) {
  return std::vector<size_t>(static_cast<size_t>(world_size), count);
}

// `memory` cut into consecutive parts.
template <class Pointer>
std::vector<Pointer> partsOf(void* memory, const std::vector<size_t>& counts, size_t width) {
  std::vector<Pointer> parts;
  auto* at = static_cast<std::byte*>(memory);
  for (size_t count : counts) {
    parts.push_back(at);
    at += count * width;
  }
  return parts;
}

Operation allReduceOf(const at::Tensor& tensor, const c10d::AllreduceOptions& options,
                      const char* call) {
  const ReduceOp op = opOf(options.reduceOp, call);
  const at::Tensor real = addable(tensor, op, call);
  const Staged staged(real, Use::kBoth, call);
  return {AllReduce{.data = staged.data(),
                    .count = countOf(real),
                    .dtype = dtypeOf(real, call),
                    .op = op,
                    .factor = factorOf(options.reduceOp)},
          timeoutOf(options.timeout), [staged] { staged.giveBack(); }};
}

// Several small tensors of one dtype as one message: each operation is a wait for everybody.  A
// large one is better off alone, since it would be copied twice.
constexpr size_t kFusedTensorBytes = 64 << 10, kFusedBytes = 1 << 20;

Operation fusedAllReduce(const Tensors& tensors, const c10d::AllreduceOptions& options,
                         const char* call) {
  const at::NoGradGuard no_grad;
  const ReduceOp op = opOf(options.reduceOp, call);
  Tensors flat;
  for (const at::Tensor& tensor : tensors) flat.push_back(addable(tensor, op, call).detach());
  for (const at::Tensor& tensor : flat)
    (void)Staged(tensor, Use::kBoth, call);  // refuses what cannot be written back
  Tensors pieces;
  for (const at::Tensor& tensor : flat) pieces.push_back(tensor.reshape({-1}));
  const at::Tensor all = at::cat(pieces);
  Operation operation = allReduceOf(all, options, call);
  operation.after = [all, flat] {
    const at::NoGradGuard no_grad;
    int64_t at = 0;
    for (const at::Tensor& tensor : flat) {
      tensor.copy_(all.narrow(0, at, tensor.numel()).view(tensor.sizes()));
      at += tensor.numel();
    }
  };
  return operation;
}

// all_gather_into_tensor.
Operation gatherInto(const at::Tensor& output, const at::Tensor& input, int world_size,
                     std::chrono::milliseconds timeout, const char* call) {
  requireDense(input, call);
  requireLike(output, input.numel() * world_size, input, call,
              "the output (the input's size times the world size)");
  const DType dtype = dtypeOf(input, call);
  StagedList staged;
  AllGather gather{.input = staged.add(input, Use::kRead, call), .dtype = dtype};
  gather.counts = equalCounts(countOf(input), world_size);
  gather.outputs =
      partsOf<void*>(staged.add(output, Use::kWrite, call), gather.counts, sizeOf(dtype));
  return {std::move(gather), timeoutOf(timeout),
          [staged = std::move(staged)] { staged.giveBack(); }};
}

// all_gather into a list: rank r's elements into outputs[r], whatever their number.
Operation gatherList(const Tensors& outputs, const at::Tensor& input, int rank,
                     std::chrono::milliseconds timeout, const char* call) {
  requireDense(input, call);
  const DType dtype = dtypeOf(input, call);
  StagedList staged;
  AllGather gather{.input = staged.add(input, Use::kRead, call), .dtype = dtype};
  for (size_t r = 0; r < outputs.size(); ++r) {
    const bool own = static_cast<int>(r) == rank;
    requireDense(outputs[r], call);
    requireLike(outputs[r], own ? input.numel() : outputs[r].numel(), input, call,
                own ? "this rank's own output" : "each output");
    gather.counts.push_back(countOf(outputs[r]));
    gather.outputs.push_back(staged.add(outputs[r], Use::kWrite, call));
  }
  return {std::move(gather), timeoutOf(timeout),
          [staged = std::move(staged)] { staged.giveBack(); }};
}

// reduce_scatter: from one input cut into equal parts, or from a list.
Operation reduceScatterOf(const at::Tensor& output, const Tensors& inputs, bool list, int rank,
                          int world_size, const c10d::ReduceScatterOptions& options,
                          const char* call) {
  requireDense(output, call);
  const ReduceOp op = opOf(options.reduceOp, call);
  const at::Tensor real = addable(output, op, call);
  const DType dtype = dtypeOf(real, call);
  StagedList staged;
  ReduceScatter scatter{.inputs = {},
                        .counts = {},
                        .output = nullptr,
                        .dtype = dtype,
                        .op = op,
                        .factor = factorOf(options.reduceOp)};
  if (list) {
    for (size_t r = 0; r < inputs.size(); ++r) {
      const bool own = static_cast<int>(r) == rank;
      requireDense(inputs[r], call);
      requireLike(inputs[r], own ? output.numel() : inputs[r].numel(), output, call,
                  own ? "this rank's own input" : "each input");
      const at::Tensor part = addable(inputs[r], op, call);
      scatter.counts.push_back(countOf(part));
      scatter.inputs.push_back(staged.add(part, Use::kRead, call));
    }
  } else {
    requireLike(inputs[0], output.numel() * world_size, output, call,
                "the input (the output's size times the world size)");
    const at::Tensor whole = addable(inputs[0], op, call);
    scatter.counts = equalCounts(countOf(real), world_size);
    scatter.inputs =
        partsOf<const void*>(staged.add(whole, Use::kRead, call), scatter.counts, sizeOf(dtype));
  }
  scatter.output = staged.add(real, Use::kWrite, call);
  return {std::move(scatter), timeoutOf(options.timeout),
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

void requireSome(const Tensors& tensors, const char* call) {
  if (tensors.empty()) refuse(call, "an empty list of tensors");
}

void requirePairs(const Tensors& outputs, const Tensors& inputs, const char* call) {
  requireSome(inputs, call);
  if (outputs.size() != inputs.size())
    refuse(call, c10::str(outputs.size(), " outputs for ", inputs.size(), " inputs"));
}

}  // namespace

// ---- reductions

Backend::WorkPtr Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return translated([&] {
    if (tensors.size() == 1 && tensors[0].defined() && tensors[0].is_sparse())
      return allreduce_sparse(tensors, options);
    const at::Tensor& tensor = onlyOne(tensors, "all_reduce");
    return start({.type = c10d::OpType::ALLREDUCE,
                  .title = "ringreduce:all_reduce",
                  .inputs = tensors,
                  .outputs = tensors,
                  .operations = {allReduceOf(tensor, options, "all_reduce")}},
                 options.asyncOp);
  });
}

Backend::WorkPtr Backend::allreduce_coalesced(Tensors& tensors,
                                              const c10d::AllreduceCoalescedOptions& options) {
  constexpr auto kCall = "all_reduce_coalesced";
  return translated([&] {
    requireSome(tensors, kCall);
    Job job{.type = c10d::OpType::ALLREDUCE_COALESCED,
            .title = "ringreduce:all_reduce",
            .inputs = tensors,
            .outputs = tensors};
    for (const at::Tensor& tensor : tensors) requireDense(tensor, kCall);
    Tensors small;
    size_t bytes = 0;
    const auto flush = [&] {
      if (small.size() == 1) job.operations.push_back(allReduceOf(small[0], options, kCall));
      if (small.size() > 1) job.operations.push_back(fusedAllReduce(small, options, kCall));
      small.clear();
      bytes = 0;
    };
    for (const at::Tensor& tensor : tensors) {
      if (tensor.nbytes() > kFusedTensorBytes) {
        flush();
        job.operations.push_back(allReduceOf(tensor, options, kCall));
        continue;
      }
      if (bytes + tensor.nbytes() > kFusedBytes ||
          (!small.empty() && small[0].scalar_type() != tensor.scalar_type()))
        flush();
      small.push_back(tensor);
      bytes += tensor.nbytes();
    }
    flush();
    return start(std::move(job), options.asyncOp);
  });
}

Backend::WorkPtr Backend::allreduce_sparse(Tensors& tensors,
                                           const c10d::AllreduceOptions& options) {
  return translated([&] {
    if (tensors.size() != 1) refuse("sparse all_reduce", "takes one tensor");
    return start({.type = c10d::OpType::_ALLREDUCE_SPARSE,
                  .title = "ringreduce:sparse_all_reduce",
                  .inputs = {},  // the profiler has no record of sparse shapes
                  .outputs = tensors,
                  .operations = {sparseAllReduce(tensors[0], options)}},
                 options.asyncOp);
  });
}

c10::intrusive_ptr<c10::ivalue::Future> Backend::averageBucket(const at::Tensor& bucket,
                                                               Context context) {
  return translated([&] {
    requireDense(bucket, "DDP hook");
    const Staged staged(bucket, Use::kBoth, "DDP hook");
    return start({.type = c10d::OpType::ALLREDUCE,
                  .title = "ringreduce:all_reduce",
                  .inputs = {bucket},
                  .outputs = {bucket},
                  .operations = {{AllReduce{.data = staged.data(),
                                            .count = countOf(bucket),
                                            .dtype = dtypeOf(bucket, "DDP hook"),
                                            .op = ReduceOp::kAvg},
                                  0, [staged] { staged.giveBack(); }}},
                  .context = std::move(context),
                  .future_of_one = true},
                 /*async=*/true)
        ->getFuture();
  });
}

Backend::WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return translated([&] {
    const at::Tensor& tensor = onlyOne(tensors, "reduce");
    const ReduceOp op = opOf(options.reduceOp, "reduce");
    const at::Tensor real = addable(tensor, op, "reduce");
    const bool root = options.rootRank == rank_;
    const Staged staged(real, root ? Use::kBoth : Use::kRead, "reduce");
    return start({.type = c10d::OpType::REDUCE,
                  .title = "ringreduce:reduce",
                  .inputs = tensors,
                  .outputs = tensors,
                  .operations = {{Reduce{.input = staged.data(),
                                         .output = staged.data(),
                                         .count = countOf(real),
                                         .dtype = dtypeOf(real, "reduce"),
                                         .op = op,
                                         .root = static_cast<int>(options.rootRank),
                                         .factor = factorOf(options.reduceOp)},
                                  timeoutOf(options.timeout), [staged] { staged.giveBack(); }}}},
                 options.asyncOp);
  });
}

Backend::WorkPtr Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                         const c10d::ReduceScatterOptions& options) {
  return translated([&] {
    const at::Tensor& output = onlyOne(outputs, "reduce_scatter");
    const Tensors& list = onlyList(inputs, static_cast<size_t>(size_), "reduce_scatter", "input");
    return start({.type = c10d::OpType::REDUCE_SCATTER,
                  .title = "ringreduce:reduce_scatter",
                  .inputs = list,
                  .outputs = outputs,
                  .operations = {reduceScatterOf(output, list, /*list=*/true, rank_, size_, options,
                                                 "reduce_scatter")}},
                 options.asyncOp);
  });
}

Backend::WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::ReduceScatterOptions& options) {
  return translated([&] {
    requireDense(input, "reduce_scatter_tensor");
    return start({.type = c10d::OpType::_REDUCE_SCATTER_BASE,
                  .title = "ringreduce:reduce_scatter_tensor",
                  .inputs = {input},
                  .outputs = {output},
                  .operations = {reduceScatterOf(output, {input}, /*list=*/false, rank_, size_,
                                                 options, "reduce_scatter_tensor")}},
                 options.asyncOp);
  });
}

Backend::WorkPtr Backend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  constexpr auto kCall = "reduce_scatter_tensor_coalesced";
  return translated([&] {
    requirePairs(outputs, inputs, kCall);
    Job job{.type = c10d::OpType::COALESCED,
            .title = "ringreduce:reduce_scatter_tensor_coalesced",
            .inputs = inputs,
            .outputs = outputs};
    for (size_t i = 0; i < inputs.size(); ++i) {
      requireDense(inputs[i], kCall);
      job.operations.push_back(
          reduceScatterOf(outputs[i], {inputs[i]}, /*list=*/false, rank_, size_, options, kCall));
    }
    return start(std::move(job), options.asyncOp);
  });
}

// ---- calls that only move bytes

Backend::WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return translated([&] {
    const at::Tensor& tensor = onlyOne(tensors, "broadcast");
    const bool root = options.rootRank == rank_;
    const Staged staged(tensor, root ? Use::kRead : Use::kWrite, "broadcast");
    return start({.type = c10d::OpType::BROADCAST,
                  .title = "ringreduce:broadcast",
                  .inputs = tensors,
                  .outputs = tensors,
                  .operations = {{Broadcast{.data = staged.data(),
                                            .count = countOf(tensor),
                                            .dtype = dtypeOf(tensor, "broadcast"),
                                            .root = static_cast<int>(options.rootRank)},
                                  timeoutOf(options.timeout), [staged] { staged.giveBack(); }}}},
                 options.asyncOp);
  });
}

Backend::WorkPtr Backend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                    const c10d::AllgatherOptions& options) {
  return translated([&] {
    const at::Tensor& input = onlyOne(inputs, "all_gather");
    const Tensors& list = onlyList(outputs, static_cast<size_t>(size_), "all_gather", "output");
    return start({.type = c10d::OpType::ALLGATHER,
                  .title = "ringreduce:all_gather",
                  .inputs = inputs,
                  .outputs = list,
                  .operations = {gatherList(list, input, rank_, options.timeout, "all_gather")}},
                 options.asyncOp);
  });
}

Backend::WorkPtr Backend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) {
  constexpr auto kCall = "all_gather_coalesced";
  return translated([&] {
    requireSome(inputs, kCall);
    if (outputs.size() != static_cast<size_t>(size_))
      refuse(kCall, c10::str("needs ", size_, " lists of outputs, one for each rank, not ",
                             outputs.size()));
    Job job{.type = c10d::OpType::ALLGATHER_COALESCED,
            .title = "ringreduce:all_gather",
            .inputs = inputs};
    for (const Tensors& list : outputs) {
      if (list.size() != inputs.size())
        refuse(kCall,
               c10::str("a list of ", list.size(), " outputs for ", inputs.size(), " inputs"));
      job.outputs.insert(job.outputs.end(), list.begin(), list.end());
    }
    for (size_t i = 0; i < inputs.size(); ++i) {
      Tensors by_rank;
      for (const Tensors& list : outputs) by_rank.push_back(list[i]);
      job.operations.push_back(gatherList(by_rank, inputs[i], rank_, options.timeout, kCall));
    }
    return start(std::move(job), options.asyncOp);
  });
}

Backend::WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::AllgatherOptions& options) {
  return translated([&] {
    return start({.type = c10d::OpType::_ALLGATHER_BASE,
                  .title = "ringreduce:all_gather_into_tensor",
                  .inputs = {input},
                  .outputs = {output},
                  .operations = {gatherInto(output, input, size_, options.timeout,
                                            "all_gather_into_tensor")}},
                 options.asyncOp);
  });
}

Backend::WorkPtr Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& options) {
  constexpr auto kCall = "all_gather_into_tensor_coalesced";
  return translated([&] {
    requirePairs(outputs, inputs, kCall);
    Job job{.type = c10d::OpType::COALESCED,
            .title = "ringreduce:all_gather_into_tensor_coalesced",
            .inputs = inputs,
            .outputs = outputs};
    for (size_t i = 0; i < inputs.size(); ++i)
      job.operations.push_back(gatherInto(outputs[i], inputs[i], size_, options.timeout, kCall));
    return start(std::move(job), options.asyncOp);
  });
}

Backend::WorkPtr Backend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                 const c10d::GatherOptions& options) {
  return translated([&] {
    const at::Tensor& input = onlyOne(inputs, "gather");
    const bool root = options.rootRank == rank_;
    StagedList staged;
    Gather gather{.input = staged.add(input, Use::kRead, "gather"),
                  .outputs = {},
                  .count = countOf(input),
                  .dtype = dtypeOf(input, "gather"),
                  .root = static_cast<int>(options.rootRank)};
    if (!root && !outputs.empty())
      refuse("gather", c10::str("outputs at rank ", rank_, ", which is not the destination, rank ",
                                options.rootRank));
    Tensors list;
    if (root) list = onlyList(outputs, static_cast<size_t>(size_), "gather", "output");
    for (const at::Tensor& output : list) {
      requireLike(output, input.numel(), input, "gather", "each output");
      gather.outputs.push_back(staged.add(output, Use::kWrite, "gather"));
    }
    return start({.type = c10d::OpType::GATHER,
                  .title = "ringreduce:gather",
                  .inputs = inputs,
                  .outputs = list,
                  .operations = {{std::move(gather), timeoutOf(options.timeout),
                                  [staged = std::move(staged)] { staged.giveBack(); }}}},
                 options.asyncOp);
  });
}

Backend::WorkPtr Backend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                  const c10d::ScatterOptions& options) {
  return translated([&] {
    const at::Tensor& output = onlyOne(outputs, "scatter");
    const bool root = options.rootRank == rank_;
    StagedList staged;
    Scatter scatter{.inputs = {},
                    .output = staged.add(output, Use::kWrite, "scatter"),
                    .count = countOf(output),
                    .dtype = dtypeOf(output, "scatter"),
                    .root = static_cast<int>(options.rootRank)};
    if (!root && !inputs.empty())
      refuse("scatter", c10::str("inputs at rank ", rank_, ", which is not the source, rank ",
                                 options.rootRank));
    Tensors list;
    if (root) list = onlyList(inputs, static_cast<size_t>(size_), "scatter", "input");
    for (const at::Tensor& input : list) {
      requireLike(input, output.numel(), output, "scatter", "each input");
      scatter.inputs.push_back(staged.add(input, Use::kRead, "scatter"));
    }
    return start({.type = c10d::OpType::SCATTER,
                  .title = "ringreduce:scatter",
                  .inputs = list,
                  .outputs = outputs,
                  .operations = {{std::move(scatter), timeoutOf(options.timeout),
                                  [staged = std::move(staged)] { staged.giveBack(); }}}},
                 options.asyncOp);
  });
}

Backend::WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                        std::vector<int64_t>& output_splits,
                                        std::vector<int64_t>& input_splits,
                                        const c10d::AllToAllOptions& options) {
  constexpr auto kCall = "all_to_all_single";
  return translated([&] {
    requireDense(input, kCall);
    requireDense(output, kCall);
    const bool even = input_splits.empty() && output_splits.empty();
    if (input.scalar_type() != output.scalar_type())
      refuse(kCall, c10::str("an input of ", input.scalar_type(), " and an output of ",
                             output.scalar_type()));
    if (even) requireLike(output, input.numel(), input, kCall, "the output (as the input)");
    const DType dtype = dtypeOf(input, kCall);
    StagedList staged;
    AllToAll exchange{.inputs = {},
                      .outputs = {},
                      .send_counts = splitCounts(input, input_splits, size_, kCall, "input"),
                      .recv_counts = splitCounts(output, output_splits, size_, kCall, "output"),
                      .even = even,
                      .dtype = dtype};
    const auto own = static_cast<size_t>(rank_);
    if (exchange.send_counts[own] != exchange.recv_counts[own])
      refuse(kCall, c10::str("this rank sends itself ", exchange.send_counts[own],
                             " elements and expects ", exchange.recv_counts[own]));
    exchange.inputs = partsOf<const void*>(staged.add(input, Use::kRead, kCall),
                                           exchange.send_counts, sizeOf(dtype));
    exchange.outputs =
        partsOf<void*>(staged.add(output, Use::kWrite, kCall), exchange.recv_counts, sizeOf(dtype));
    return start({.type = c10d::OpType::ALLTOALL_BASE,
                  .title = "ringreduce:all_to_all",
                  .inputs = {input},
                  .outputs = {output},
                  .operations = {{std::move(exchange), timeoutOf(options.timeout),
                                  [staged = std::move(staged)] { staged.giveBack(); }}}},
                 options.asyncOp);
  });
}

Backend::WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs,
                                   const c10d::AllToAllOptions& options) {
  constexpr auto kCall = "all_to_all";
  return translated([&] {
    const auto P = static_cast<size_t>(size_);
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
      const int64_t own = static_cast<int>(r) == rank_ ? inputs[r].numel() : -1;
      requireLike(inputs[r], inputs[r].numel(), inputs[0], kCall, "each input");
      requireLike(outputs[r], own >= 0 ? own : outputs[r].numel(), inputs[0], kCall,
                  own >= 0 ? "this rank's own output" : "each output");
      exchange.send_counts.push_back(countOf(inputs[r]));
      exchange.recv_counts.push_back(countOf(outputs[r]));
      exchange.inputs.push_back(staged.add(inputs[r], Use::kRead, kCall));
      exchange.outputs.push_back(staged.add(outputs[r], Use::kWrite, kCall));
    }
    return start({.type = c10d::OpType::ALLTOALL,
                  .title = "ringreduce:all_to_all",
                  .inputs = inputs,
                  .outputs = outputs,
                  .operations = {{std::move(exchange), timeoutOf(options.timeout),
                                  [staged = std::move(staged)] { staged.giveBack(); }}}},
                 options.asyncOp);
  });
}

// ---- barriers

Backend::WorkPtr Backend::barrier(const c10d::BarrierOptions& options) {
  return translated([&] {
    return start({.type = c10d::OpType::BARRIER,
                  .title = "ringreduce:barrier",
                  .operations = {{Barrier{}, timeoutOf(options.timeout)}}},
                 options.asyncOp);
  });
}

// All absent ranks are always named, so `wait_all_ranks` changes nothing.
void Backend::monitoredBarrier(const c10d::BarrierOptions& options, bool /*wait_all_ranks*/) {
  translated([&] {
    // A timeout of 0 is one, here: who is not there already is late.
    const Nanos timeout = options.timeout.count() == 0 ? 1 : timeoutOf(options.timeout);
    start({.type = c10d::OpType::BARRIER,
           .title = "ringreduce:monitored_barrier",
           .operations = {{MonitoredBarrier{}, timeout}}},
          /*async=*/false);
  });
}

}  // namespace ringreduce
