// All-reduces of the backend whose values travel coded.  Gradients of a GPU are coded in the host's
// memory, where they are copied to.
#include <c10/core/StreamGuard.h>

#include <chrono>
#include <thread>
#include <utility>

#include "base/error.h"
#include "group/compression.h"
#include "torch/arguments.h"
#include "torch/backend.h"
#include "torch/errors.h"
#include "torch/gpu_backend.h"
#include "torch/host_trip.h"

namespace ringreduce {
namespace {

using Use = Staged::Use;
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

// Until the bucket is in the host's memory, or the group has failed.  In the group's worker, whose
// waits nobody else ends: a GPU may take long, or stand still.
void await(const HostTrip& trip, Group& group) {
  const Nanos began = now();
  try {
    while (!trip.hasArrived()) {
      group.checkHealth();
      if (group.options().interrupted && group.options().interrupted(began))
        group.abort("interrupted while it waited for gradients to be computed on a GPU");
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {  // CUDA's: the other ranks are not to wait for this one
    group.abort(std::string("its GPU failed: ") + error.what());
    throw;
  }
}

// The Future of a bucket whose average is then copied to the GPU.  It is complete when that copy is
// in its stream; whoever uses its value is ordered behind.
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
    // A Future takes the end of the current streams for the time at which its value is there.
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
      if (OutputMemory({input, output}).overlaps(*error))
        refuse(kCompressedCall, "the error needs memory of its own");
    }
    const bool same = output.is_same(input);
    const Staged out(output, same ? Use::kBoth : Use::kWrite, kCompressedCall);
    const Staged in(same ? input : OutputMemory({output}).copyIfShared(input),
                    same ? Use::kBoth : Use::kRead, kCompressedCall);
    std::optional<Staged> lost;
    if (error) lost.emplace(*error, Use::kWrite, kCompressedCall);
    return start(
        {.type = c10d::OpType::ALLREDUCE,
         .title = "ringreduce:compressed_all_reduce",
         .inputs = {input},
         .outputs = {output},
         .operations = {{CompressedAllReduce{
                             .input = static_cast<const float*>(same ? out.data() : in.data()),
                             .output = static_cast<float*>(out.data()),
                             .count = countOf(input),
                             .coding = coding,
                             .op = op,
                             .schedule = schedule,
                             .error = lost ? static_cast<float*>(lost->data()) : nullptr},
                         0,
                         [in, out, lost] {
                           out.giveBack();
                           if (lost) lost->giveBack();
                         }}}},
        async);
  });
}

FuturePtr Backend::averageBucket(const at::Tensor& bucket, Compression& compression,
                                 std::vector<Part> parts, bool last, Context context) {
  return translated([&] {
    GpuBackend* const gpu = gpuFor(bucket);
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
    const auto averaged = start({.type = c10d::OpType::ALLREDUCE,
                                 .title = "ringreduce:compressed_all_reduce",
                                 .inputs = {bucket},
                                 .outputs = {trip ? trip->host() : bucket},
                                 .operations = std::move(operations),
                                 .context = std::move(context),
                                 .future_of_one = true},
                                /*async=*/true)
                              ->getFuture();
    return trip ? broughtBack(averaged, trip, bucket) : averaged;
  });
}

}  // namespace ringreduce
