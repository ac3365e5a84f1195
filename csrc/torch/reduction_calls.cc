// The reductions of the backend: torch's calls, checked and turned into operations.
//
// A check that fails here raises ValueError before anything is sent, and the group stays usable.
#include <ATen/core/grad_mode.h>

#include <utility>

#include "base/error.h"
#include "torch/arguments.h"
#include "torch/backend.h"
#include "torch/errors.h"
#include "torch/gpu_backend.h"
#include "torch/sparse.h"

namespace ringreduce {
namespace {

using Use = Staged::Use;

Operation allReduceOf(const at::Tensor& tensor, const c10d::AllreduceOptions& options,
                      const char* call) {
  const ReduceOp op = opOf(options.reduceOp, call);
  const at::Tensor real = addable(tensor, op, call);
  const Staged staged(real, Use::kBoth, call);
  return {AllReduce{.data = staged.data(),
                    .count = countOf(real),
                    .dtype = dtypeOf(real, call),
                    .op = op,
                    .factor = numberOf(factorOf(options.reduceOp))},
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

// reduce_scatter, from one input cut into equal parts or from a list.  `written`: all outputs of
// the whole call.
Operation reduceScatterOf(const at::Tensor& output, const Tensors& inputs,
                          const OutputMemory& written, bool list, int rank, int world_size,
                          const c10d::ReduceScatterOptions& options, const char* call) {
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
                        .factor = numberOf(factorOf(options.reduceOp))};
  if (list) {
    for (size_t r = 0; r < inputs.size(); ++r) {
      const bool own = static_cast<int>(r) == rank;
      requireDense(inputs[r], call);
      requireLike(inputs[r], own ? output.numel() : inputs[r].numel(), output, call,
                  own ? "this rank's own input" : "each input");
      const bool in_place = own && isPartOf(output, inputs[r], 0);
      const at::Tensor part =
          addable(written.copyIfShared(inputs[r], in_place ? &output : nullptr), op, call);
      scatter.counts.push_back(countOf(part));
      scatter.inputs.push_back(staged.add(part, Use::kRead, call));
    }
  } else {
    requireLike(inputs[0], output.numel() * world_size, output, call,
                "the input (the output's size times the world size)");
    const bool in_place = isPartOf(output, inputs[0], rank);
    const at::Tensor whole =
        addable(written.copyIfShared(inputs[0], in_place ? &output : nullptr), op, call);
    scatter.counts = equalCounts(countOf(real), world_size);
    scatter.inputs =
        partsOf<const void*>(staged.add(whole, Use::kRead, call), scatter.counts, sizeOf(dtype));
  }
  scatter.output = staged.add(real, Use::kWrite, call);
  return {std::move(scatter), timeoutOf(options.timeout),
          [staged = std::move(staged)] { staged.giveBack(); }};
}

}  // namespace

Backend::WorkPtr Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (GpuBackend* gpu = gpuFor(tensors)) return gpu->allreduce(tensors, options);
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
  if (GpuBackend* gpu = gpuFor(tensors)) return gpu->allreduce_coalesced(tensors, options);
  constexpr auto kCall = "all_reduce_coalesced";
  return translated([&] {
    requireSome(tensors, kCall);
    Job job{.type = c10d::OpType::ALLREDUCE_COALESCED,
            .title = "ringreduce:all_reduce",
            .inputs = tensors,
            .outputs = tensors};
    for (const at::Tensor& tensor : tensors) requireDense(tensor, kCall);
    // Tensors that share memory are all read before one is written.  The list of operations must
    // not depend on it, because other ranks' tensors may not share memory.
    const bool copied = anyShareMemory(tensors);
    const auto add = [&](const Tensors& some) {
      job.operations.push_back(some.size() > 1 || copied ? fusedAllReduce(some, options, kCall)
                                                         : allReduceOf(some[0], options, kCall));
    };
    Tensors small;
    size_t bytes = 0;
    const auto flush = [&] {
      if (!small.empty()) add(small);
      small.clear();
      bytes = 0;
    };
    for (const at::Tensor& tensor : tensors) {
      if (tensor.nbytes() > kFusedTensorBytes) {
        flush();
        add({tensor});
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
  if (GpuBackend* gpu = gpuFor(tensors)) return gpu->allreduce_sparse(tensors, options);
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
  if (GpuBackend* gpu = gpuFor(bucket)) return gpu->averageBucket(bucket, std::move(context));
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
  if (GpuBackend* gpu = gpuFor(tensors)) return gpu->reduce(tensors, options);
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
                                         .factor = numberOf(factorOf(options.reduceOp))},
                                  timeoutOf(options.timeout), [staged] { staged.giveBack(); }}}},
                 options.asyncOp);
  });
}

Backend::WorkPtr Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                         const c10d::ReduceScatterOptions& options) {
  if (GpuBackend* gpu = gpuFor(outputs)) return gpu->reduce_scatter(outputs, inputs, options);
  return translated([&] {
    const at::Tensor& output = onlyOne(outputs, "reduce_scatter");
    const Tensors& list = onlyList(inputs, static_cast<size_t>(size_), "reduce_scatter", "input");
    return start({.type = c10d::OpType::REDUCE_SCATTER,
                  .title = "ringreduce:reduce_scatter",
                  .inputs = list,
                  .outputs = outputs,
                  .operations = {reduceScatterOf(output, list, OutputMemory(outputs), /*list=*/true,
                                                 rank_, size_, options, "reduce_scatter")}},
                 options.asyncOp);
  });
}

Backend::WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::ReduceScatterOptions& options) {
  if (GpuBackend* gpu = gpuFor(output)) return gpu->_reduce_scatter_base(output, input, options);
  return translated([&] {
    requireDense(input, "reduce_scatter_tensor");
    return start(
        {.type = c10d::OpType::_REDUCE_SCATTER_BASE,
         .title = "ringreduce:reduce_scatter_tensor",
         .inputs = {input},
         .outputs = {output},
         .operations = {reduceScatterOf(output, {input}, OutputMemory({output}), /*list=*/false,
                                        rank_, size_, options, "reduce_scatter_tensor")}},
        options.asyncOp);
  });
}

Backend::WorkPtr Backend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  if (GpuBackend* gpu = gpuFor(outputs))
    return gpu->reduce_scatter_tensor_coalesced(outputs, inputs, options);
  constexpr auto kCall = "reduce_scatter_tensor_coalesced";
  return translated([&] {
    requirePairs(outputs, inputs, kCall);
    Job job{.type = c10d::OpType::COALESCED,
            .title = "ringreduce:reduce_scatter_tensor_coalesced",
            .inputs = inputs,
            .outputs = outputs};
    const OutputMemory written(outputs);
    for (size_t i = 0; i < inputs.size(); ++i) {
      requireDense(inputs[i], kCall);
      job.operations.push_back(reduceScatterOf(outputs[i], {inputs[i]}, written, /*list=*/false,
                                               rank_, size_, options, kCall));
    }
    return start(std::move(job), options.asyncOp);
  });
}

}  // namespace ringreduce
