// The reductions of the backend: torch's calls, checked and turned into operations.
//
// A check that fails here raises ValueError before anything is sent, and the group stays usable.
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "group/compression.h"
#include "torch/arguments.h"
#include "torch/backend.h"
#include "torch/errors.h"
#include "torch/gpu_backend.h"
#include "torch/staged_backend.h"

namespace ringreduce {
namespace {

using Use = Staged::Use;

Operation sparseAllReduce(const at::Tensor& tensor, const c10d::AllreduceOptions& options);

Operation allReduceOf(const at::Tensor& tensor, const c10d::AllreduceOptions& options,
                      const char* call) {
  const ReduceOp op = opOf(options.reduceOp, call);
  Staged staged(addable(tensor, op, call), Use::kBoth, call);
  const at::Tensor& real = staged.memory();
  const AllReduce all_reduce{.data = staged.data(),
                             .count = countOf(real),
                             .dtype = dtypeOf(real, call),
                             .op = op,
                             .factor = numberOf(factorOf(options.reduceOp))};
  return {all_reduce, timeoutOf(options.timeout),
          [staged = std::move(staged)] { staged.giveBack(); }};
}

// Several small tensors of one dtype become one message, because each operation waits for all
// ranks.  A large tensor goes alone, because it would be copied twice.
constexpr size_t kFusedTensorBytes = 64 << 10, kFusedBytes = Buffers::kBytes;

Operation fusedAllReduce(const Tensors& tensors, const c10d::AllreduceOptions& options,
                         const std::shared_ptr<Buffers>& buffers, const char* call) {
  const at::NoGradGuard no_grad;
  const ReduceOp op = opOf(options.reduceOp, call);
  Tensors pieces;
  std::vector<Staged> places;
  std::vector<size_t> sizes;
  size_t elements = 0;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor real = addable(tensor, op, call).detach();
    places.emplace_back(real, Use::kWrite, call);
    pieces.push_back(real.reshape({-1}));
    sizes.push_back(countOf(real));
    elements += sizes.back();
  }
  const size_t width = pieces[0].element_size();
  const std::shared_ptr<at::Tensor> buffer = buffers->take(elements * width);
  at::Tensor all =
      buffer->view(pieces[0].scalar_type()).narrow(0, 0, static_cast<int64_t>(elements));
  at::cat_out(all, pieces);
  Operation operation = allReduceOf(all, options, call);
  std::get<AllReduce>(operation.call).borders = bordersOf(sizes);
  operation.after = [buffer, all, width, places = std::move(places), sizes = std::move(sizes)] {
    const auto* from = static_cast<const std::byte*>(all.const_data_ptr());
    for (size_t i = 0; i < sizes.size(); ++i) {
      copyBytes(places[i].data(), from, sizes[i] * width);
      places[i].giveBack();
      from += sizes[i] * width;
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
  if (const auto gpu = gpuFor(tensors)) return gpu->allreduce(tensors, options);
  return translated([&] {
    if (tensors.size() == 1 && tensors[0].defined() && tensors[0].is_sparse())
      return allreduce_sparse(tensors, options);
    const at::Tensor& tensor = onlyOne(tensors, "all_reduce");
    return start(*group(), c10d::OpType::ALLREDUCE, "ringreduce:all_reduce", tensors, tensors,
                 allReduceOf(tensor, options, "all_reduce"), options.asyncOp);
  });
}

void Backend::runAllReduce(const at::Tensor& tensor, const c10d::AllreduceOptions& options) {
  constexpr auto kCall = "all_reduce";
  if (tensor.is_cuda() || tensor.is_sparse() || at::hasCallbacks() || observer_->watches()) {
    Tensors tensors{tensor};
    allreduce(tensors, options)->wait();
    return;
  }
  translated([&] {
    requireDense(tensor, kCall);
    Job job{c10d::OpType::ALLREDUCE, "ringreduce:all_reduce"};
    job.operations.push_back(allReduceOf(tensor, options, kCall));
    Work::run(*group(), observed(std::move(job)));  // blocking, so not for a coalescing block
  });
}

Backend::WorkPtr Backend::allreduce_coalesced(Tensors& tensors,
                                              const c10d::AllreduceCoalescedOptions& options) {
  if (const auto gpu = gpuFor(tensors)) return gpu->allreduce_coalesced(tensors, options);
  constexpr auto kCall = "all_reduce_coalesced";
  return translated([&] {
    requireSome(tensors, kCall);
    Job job{c10d::OpType::ALLREDUCE_COALESCED, "ringreduce:all_reduce", tensors, tensors};
    for (const at::Tensor& tensor : tensors) requireDense(tensor, kCall);
    // Tensors that share memory are all read before one is written.  The list of operations must
    // not depend on it, because other ranks' tensors may not share memory.
    const bool copied = anyShareMemory(tensors);
    const auto add = [&](const Tensors& some) {
      job.operations.push_back(some.size() > 1 || copied
                                   ? fusedAllReduce(some, options, buffers_, kCall)
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
    return start(*group(), std::move(job), options.asyncOp);
  });
}

BucketAverage Backend::averageBucket(const at::Tensor& bucket, uint64_t borders, Context context) {
  if (const auto gpu = gpuFor(bucket))
    return gpu->averageBucket(bucket, borders, std::move(context));
  return translated([&]() -> BucketAverage {
    if (bucket.is_sparse()) {
      c10d::AllreduceOptions options;
      options.reduceOp = c10d::ReduceOp::AVG;
      Job job{.type = c10d::OpType::_ALLREDUCE_SPARSE,
              .title = "ringreduce:sparse_all_reduce",
              .outputs = {bucket},
              .context = std::move(context),
              .future_of_one = true};
      job.operations.push_back(sparseAllReduce(bucket, options));
      const WorkPtr work = start(*group(), std::move(job), /*async=*/true);
      return {work, work->getFuture()};
    }
    requireDense(bucket, "DDP hook");
    const Staged staged(bucket, Use::kBoth, "DDP hook");
    const WorkPtr work = start(*group(),
                               {c10d::OpType::ALLREDUCE,
                                "ringreduce:all_reduce",
                                {bucket},
                                {bucket},
                                {{AllReduce{.data = staged.data(),
                                            .count = countOf(bucket),
                                            .dtype = dtypeOf(bucket, "DDP hook"),
                                            .op = ReduceOp::kAvg,
                                            .borders = borders},
                                  0, [staged] { staged.giveBack(); }}},
                                std::move(context),
                                true},
                               /*async=*/true);
    return {work, work->getFuture()};
  });
}

Backend::WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  if (const auto gpu = gpuFor(tensors)) return gpu->reduce(tensors, options);
  return translated([&] {
    const std::shared_ptr<Group> group = this->group();
    const at::Tensor& tensor = onlyOne(tensors, "reduce");
    const ReduceOp op = opOf(options.reduceOp, "reduce");
    const at::Tensor real = addable(tensor, op, "reduce");
    const bool root = options.rootRank == group->rank();
    const Staged staged(real, root ? Use::kBoth : Use::kRead, "reduce");
    return start(*group, c10d::OpType::REDUCE, "ringreduce:reduce", tensors, tensors,
                 {Reduce{.input = staged.data(),
                         .output = staged.data(),
                         .count = countOf(real),
                         .dtype = dtypeOf(real, "reduce"),
                         .op = op,
                         .root = static_cast<int>(options.rootRank),
                         .factor = numberOf(factorOf(options.reduceOp))},
                  timeoutOf(options.timeout), [staged] { staged.giveBack(); }},
                 options.asyncOp);
  });
}

Backend::WorkPtr Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                         const c10d::ReduceScatterOptions& options) {
  if (const auto gpu = gpuFor(outputs)) return gpu->reduce_scatter(outputs, inputs, options);
  return translated([&] {
    const std::shared_ptr<Group> group = this->group();
    const at::Tensor& output = onlyOne(outputs, "reduce_scatter");
    const Tensors& list =
        onlyList(inputs, static_cast<size_t>(group->size()), "reduce_scatter", "input");
    return start(
        *group, c10d::OpType::REDUCE_SCATTER, "ringreduce:reduce_scatter", list, outputs,
        reduceScatterOf(output, list, OutputMemory(outputs, "reduce_scatter"), /*list=*/true,
                        group->rank(), group->size(), options, "reduce_scatter"),
        options.asyncOp);
  });
}

Backend::WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::ReduceScatterOptions& options) {
  if (const auto gpu = gpuFor(output)) return gpu->_reduce_scatter_base(output, input, options);
  return translated([&] {
    const std::shared_ptr<Group> group = this->group();
    requireDense(input, "reduce_scatter_tensor");
    return start(*group, c10d::OpType::_REDUCE_SCATTER_BASE, "ringreduce:reduce_scatter_tensor",
                 {input}, {output},
                 reduceScatterOf(output, {input}, OutputMemory({output}, "reduce_scatter_tensor"),
                                 /*list=*/false, group->rank(), group->size(), options,
                                 "reduce_scatter_tensor"),
                 options.asyncOp);
  });
}

Backend::WorkPtr Backend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  if (const auto gpu = gpuFor(outputs))
    return gpu->reduce_scatter_tensor_coalesced(outputs, inputs, options);
  constexpr auto kCall = "reduce_scatter_tensor_coalesced";
  return translated([&] {
    const std::shared_ptr<Group> group = this->group();
    requirePairs(outputs, inputs, kCall);
    Job job{c10d::OpType::COALESCED, "ringreduce:reduce_scatter_tensor_coalesced", inputs, outputs};
    const OutputMemory written(outputs, kCall);
    for (size_t i = 0; i < inputs.size(); ++i) {
      requireDense(inputs[i], kCall);
      job.operations.push_back(reduceScatterOf(outputs[i], {inputs[i]}, written, /*list=*/false,
                                               group->rank(), group->size(), options, kCall));
    }
    return start(*group, std::move(job), options.asyncOp);
  });
}

// ---- sparse
//
// Every rank gathers the elements of all and adds them in the order of ranks: so all have the same
// bits.  The number of elements, their indices and their values travel.

namespace {

constexpr auto kSparseCall = "sparse all_reduce";

// A hash on which the ranks must agree: otherwise indices would point outside a tensor.
uint64_t shapeOf(const at::Tensor& tensor) {
  uint64_t hash = mixed(tensor.is_complex(), static_cast<uint64_t>(tensor.sparse_dim()));
  for (int64_t size : tensor.sizes()) hash = mixed(hash, static_cast<uint64_t>(size));
  return hash;
}

at::Tensor packed(const at::Tensor& tensor) {
  const at::Tensor indices = tensor._indices().contiguous(), values = tensor._values().contiguous();
  const int64_t elements = indices.size(1);
  at::Tensor bytes = at::empty(
      {static_cast<int64_t>(sizeof elements + indices.nbytes() + values.nbytes())}, at::kByte);
  auto* at = bytes.data_ptr<uint8_t>();
  copyBytes(at, &elements, sizeof elements);
  copyBytes(at + sizeof elements, indices.data_ptr(), indices.nbytes());
  copyBytes(at + sizeof elements + indices.nbytes(), values.data_ptr(), values.nbytes());
  return bytes;
}

// Another rank's elements, in a tensor like `own`.
at::Tensor unpacked(const at::Tensor& bytes, const at::Tensor& own) {
  int64_t elements = 0;
  const auto* at = bytes.data_ptr<uint8_t>();
  copyBytes(&elements, at, sizeof elements);
  at::Tensor indices = at::empty({own.sparse_dim(), elements}, at::kLong);
  std::vector<int64_t> shape = own._values().sizes().vec();
  shape[0] = elements;
  at::Tensor values = at::empty(shape, own._values().options());
  copyBytes(indices.data_ptr(), at + sizeof elements, indices.nbytes());
  copyBytes(values.data_ptr(), at + sizeof elements + indices.nbytes(), values.nbytes());
  return at::_sparse_coo_tensor_unsafe(indices, values, own.sizes())._coalesced_(true);
}

// In a wider dtype where the own one would round at every addition, or cannot be added.  Not by one
// coalesce() of all parts, which adds equal indices in no particular order.
at::Tensor sumOf(const std::vector<at::Tensor>& parts, const at::Tensor& own, ReduceOp op) {
  const auto dtype = own.scalar_type();
  const bool half = dtype == at::kHalf || dtype == at::kBFloat16;
  const auto wide = half ? at::kFloat : dtype == at::kBool ? at::kInt : dtype;
  at::Tensor sum = parts[0].to(wide);
  for (size_t k = 1; k < parts.size(); ++k) sum = sum.add(parts[k].to(wide));
  sum = sum.coalesce();
  at::Tensor result = sum._values();
  if (op == ReduceOp::kAvg) result = result.div(static_cast<double>(parts.size()));
  return at::_sparse_coo_tensor_unsafe(sum._indices(), result.to(dtype), own.sizes())
      ._coalesced_(true);
}

// The sum (or average) of a COO tensor over all ranks, in place.  Ranks may differ in their number
// of non-zero elements; shapes, sparse dimensions and dtype must agree.
Operation sparseAllReduce(const at::Tensor& tensor, const c10d::AllreduceOptions& options) {
  if (!tensor.defined() || tensor.layout() != at::kSparse)
    refuse(kSparseCall, "takes sparse tensors in COO layout");
  requireCpu(tensor, kSparseCall);
  const ReduceOp op = opOf(options.reduceOp, kSparseCall);
  // Complex numbers are added as pairs of real ones.
  const auto real = c10::toRealValueType(tensor.scalar_type());
  const DType dtype = dtypeOf(at::empty({0}, real), kSparseCall);
  if (op != ReduceOp::kSum && !(op == ReduceOp::kAvg && isFloating(dtype)))
    refuse(kSparseCall, std::string("cannot take ") + name(op) + " of " + name(dtype) +
                            " elements; it adds, and averages floating-point and complex ones");
  const at::NoGradGuard no_grad;
  const at::Tensor own = tensor.detach().coalesce();
  const at::Tensor bytes = packed(own);
  const auto received = std::make_shared<std::vector<at::Tensor>>();
  const auto place = [received](const std::vector<size_t>& counts) {
    std::vector<void*> outputs;
    for (size_t count : counts) {
      received->push_back(at::empty({static_cast<int64_t>(count)}, at::kByte));
      outputs.push_back(received->back().data_ptr());
    }
    return outputs;
  };
  const auto add = [received, own, bytes, tensor, op] {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> parts;
    for (const at::Tensor& bytes : *received) parts.push_back(unpacked(bytes, own));
    tensor.copy_(sumOf(parts, own, op));  // not of detach(), whose elements are its own
  };
  Operation operation{.call = Barrier{}, .timeout = timeoutOf(options.timeout), .after = add};
  auto& reduce = operation.call.emplace<SparseAllReduce>();
  reduce.count = static_cast<size_t>(tensor.numel()) * (tensor.is_complex() ? 2 : 1);
  reduce.dtype = dtype;
  reduce.op = op;
  reduce.shape = shapeOf(tensor);
  reduce.gather.input = bytes.data_ptr();
  reduce.gather.count = static_cast<size_t>(bytes.numel());
  reduce.gather.dtype = DType::kUInt8;
  reduce.gather.place = place;
  return operation;
}

}  // namespace

Backend::WorkPtr Backend::allreduce_sparse(Tensors& tensors,
                                           const c10d::AllreduceOptions& options) {
  if (const auto gpu = gpuFor(tensors)) return gpu->allreduce_sparse(tensors, options);
  return translated([&] {
    if (tensors.size() != 1) refuse("sparse all_reduce", "takes one tensor");
    return start(*group(), c10d::OpType::_ALLREDUCE_SPARSE, "ringreduce:sparse_all_reduce",
                 {},  // the profiler has no record of sparse shapes
                 tensors, sparseAllReduce(tensors[0], options), options.asyncOp);
  });
}

// ---- compressed
//
// Gradients of a GPU are copied to the host's memory and coded there.

namespace {

constexpr auto kCompressedCall = "compressed all_reduce", kHook = "DDP hook";

void requireFloats(const at::Tensor& tensor, const at::Tensor& like, const char* what) {
  if (tensor.defined() && tensor.is_cuda())
    refuse(kCompressedCall,
           "takes tensors in the host's memory; of a GPU's, only the DDP hook takes buckets");
  requireDense(tensor, kCompressedCall);
  if (tensor.scalar_type() != at::kFloat) refuse(kCompressedCall, "takes float32 tensors only");
  requireLike(tensor, like.numel(), like, kCompressedCall, what);
}

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

// Waits until the bucket is in the host's memory, or the group has failed.  Called in the group's
// worker; a GPU may take long or hang, so this wait checks for failure and Ctrl-C itself.
void await(const HostTrip& trip, Group& group) {
  const Nanos began = now();
  const auto has_arrived = [&] {
    return orAbort([&] { return trip.hasArrived(); },
                   [&](const std::string& why) { group.abort(why); });
  };
  while (!has_arrived()) {
    group.checkHealth();
    if (group.options().interrupted && group.options().interrupted(began))
      group.abort("interrupted while it waited for gradients to be computed on a GPU");
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

// The Future of a bucket whose average is then copied to the GPU.  It is complete when that copy is
// in its stream; work that uses its value is ordered behind the copy.
FuturePtr broughtBack(const FuturePtr& averaged, const std::shared_ptr<HostTrip>& trip,
                      const at::Tensor& bucket) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(futureType(/*of_one=*/true),
                                                         std::vector<c10::Device>{bucket.device()});
  averaged->addCallback([future, trip, bucket](c10::ivalue::Future& done) {
    if (done.hasError()) return future->setError(done.exception_ptr());
    try {
      trip->giveBack();
    } catch (...) {
      return future->setError(std::current_exception());
    }
    // markCompleted() records events in the current streams: the value is ready after them.
    const c10::StreamGuard in(trip->wayBack());
    future->markCompleted(bucket);
  });
  return future;
}

}  // namespace

Backend::WorkPtr Backend::compressedAllReduce(const at::Tensor& input, const at::Tensor& output,
                                              const std::optional<at::Tensor>& error,
                                              const Coding& coding, ReduceOp op,
                                              CodedSchedule schedule, bool async) {
  return translated([&] {
    requireFloats(input, input, "the input");
    requireFloats(output, input, "the output");
    if (error) {
      requireFloats(*error, input, "the error");
      const OutputMemory lost({*error}, kCompressedCall);
      if (lost.overlaps(input) || lost.overlaps(output))
        refuse(kCompressedCall, "the error needs memory of its own");
    }
    const bool same = output.is_same(input);
    Job job{c10d::OpType::ALLREDUCE, "ringreduce:compressed_all_reduce", {input}, {output}};
    if (error) job.others = {*error};
    const Staged out(output, same ? Use::kBoth : Use::kWrite, kCompressedCall);
    const Staged in(same ? input : OutputMemory({output}, kCompressedCall).copyIfShared(input),
                    same ? Use::kBoth : Use::kRead, kCompressedCall);
    std::optional<Staged> lost;
    if (error) lost.emplace(*error, Use::kWrite, kCompressedCall);
    job.operations.push_back(
        {CompressedAllReduce{.input = static_cast<const float*>(same ? out.data() : in.data()),
                             .output = static_cast<float*>(out.data()),
                             .count = countOf(input),
                             .coding = coding,
                             .op = op,
                             .schedule = schedule,
                             .error = lost ? static_cast<float*>(lost->data()) : nullptr},
         0, [in, out, lost] {
           out.giveBack();
           if (lost) lost->giveBack();
         }});
    return start(*group(), std::move(job), async);
  });
}

BucketAverage Backend::averageBucket(const at::Tensor& bucket, Compression& compression,
                                     std::vector<Part> parts, bool last, Context context) {
  return translated([&]() -> BucketAverage {
    const GpuPtr gpu = gpuFor(bucket);
    requireDense(bucket, kHook, gpu ? bucket.device() : c10::Device(at::kCPU));
    const DType dtype = dtypeOf(bucket, kHook);
    // In the host's memory: in its own, or where it is copied to and back from.
    const std::shared_ptr<HostTrip> trip = gpu ? gpu->toHost(bucket) : nullptr;
    const Staged staged(trip ? trip->host() : bucket, Use::kBoth, kHook);
    const std::shared_ptr<Group> group = this->group();
    std::vector<Operation> operations = compression.average({.data = staged.data(),
                                                             .count = countOf(bucket),
                                                             .dtype = dtype,
                                                             .parts = std::move(parts),
                                                             .last = last},
                                                            *group);
    if (trip)
      operations.front().before = [then = std::move(operations.front().before), trip,
                                   group = group.get()] {
        await(*trip, *group);
        then();
      };
    operations.back().after = [then = std::move(operations.back().after), staged] {
      then();
      staged.giveBack();
    };
    const WorkPtr work = start(*group,
                               {c10d::OpType::ALLREDUCE,
                                "ringreduce:compressed_all_reduce",
                                {bucket},
                                {trip ? trip->host() : bucket},
                                std::move(operations),
                                std::move(context),
                                true},
                               /*async=*/true);
    const FuturePtr averaged = work->getFuture();
    return {work, trip ? broughtBack(averaged, trip, bucket) : averaged};
  });
}

}  // namespace ringreduce
