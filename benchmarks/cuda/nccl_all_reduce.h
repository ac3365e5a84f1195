// NCCL's all-reduce, which ringreduce's is measured beside.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/config.h"
#include "base/dtype.h"
#include "base/error.h"
#include "cuda/internode/nccl.h"
#include "kernels/reduce.h"

namespace nccl {

using namespace ringreduce;

// dtypes and ops have the numbers of NCCL's enums, which are the same in all its versions.
inline constexpr int kUnsupported = -1;

inline int typeOf(DType dtype) {
  switch (dtype) {
    case DType::kInt8:
      return 0;
    case DType::kUInt8:
      return 1;
    case DType::kInt32:
      return 2;
    case DType::kInt64:
      return 4;
    case DType::kFloat16:
      return 6;
    case DType::kFloat32:
      return 7;
    case DType::kFloat64:
      return 8;
    case DType::kBFloat16:
      return 9;
    default:
      return kUnsupported;
  }
}

// PREMUL_SUM is an op that is made for each factor.
inline int opOf(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return 0;
    case ReduceOp::kProduct:
      return 1;
    case ReduceOp::kMax:
      return 2;
    case ReduceOp::kMin:
      return 3;
    case ReduceOp::kAvg:
      return 4;
    default:
      return kUnsupported;
  }
}

// A factor as one element of `dtype`.
struct Scalar {
  alignas(8) unsigned char bytes[8] = {};

  Scalar(DType dtype, double factor) {
    const float one = 1;
    const double one_double = 1;
    const uint16_t one_half = dtype == DType::kFloat16 ? 0x3c00 : 0x3f80;
    const void* const source = dtype == DType::kFloat64   ? static_cast<const void*>(&one_double)
                               : dtype == DType::kFloat32 ? static_cast<const void*>(&one)
                                                          : &one_half;
    scale(dtype, bytes, source, 1, factor);
  }
};

// Why this version of NCCL, as this process's environment is now, takes no ranks that share a GPU,
// and what to do; "" if it does.
inline std::string whyNoSharedGpu(const cuda::NcclLibrary& library) {
  constexpr int kFirstToShareGpus = 23000;
  if (library.version() < kFirstToShareGpus)
    return library.description() +
           " refuses ranks that share a GPU: name a libnccl.so.2 of version 2.30.0 or newer with "
           "RINGREDUCE_NCCL";
  if (!Config::read().nccl_shares_gpus)
    return library.description() +
           " takes ranks that share a GPU only with NCCL_MULTI_RANK_GPU_ENABLE=1: set it before "
           "the "
           "program starts";
  return "";
}

using Communicators = std::vector<std::unique_ptr<cuda::NcclCommunicator>>;

// All ranks of a group in the calling thread, on one device.  More than two need a bound on their
// blocks, or their kernels are not all resident and wait for each other for ever.
inline Communicators makeAll(const std::shared_ptr<const cuda::NcclLibrary>& library,
                             int world_size, int most_blocks = 0) {
  if (world_size > 1)
    if (const std::string why = whyNoSharedGpu(*library); !why.empty())
      throw Error(Failure::kSetup, why);
  // Not ncclCommInitAll: that one refuses a device that is named twice, in every version.
  const cuda::NcclId id = library->makeId();
  Communicators all;
  cuda::NcclGroup group(*library);
  for (int rank = 0; rank < world_size; ++rank)
    all.push_back(
        std::make_unique<cuda::NcclCommunicator>(library, id, rank, world_size, most_blocks));
  group.end();
  return all;
}

// NCCL cannot reduce every pair of dtype and op that ringreduce can.
inline bool supports(DType dtype, ReduceOp op) {
  return typeOf(dtype) != kUnsupported && isSupported(dtype, op) &&
         (opOf(op) != kUnsupported || op == ReduceOp::kPremulSum);
}

// The call, with its functions found once.
class AllReduce {
 public:
  explicit AllReduce(const cuda::NcclLibrary& library) {
    find(library, "ncclAllReduce", all_reduce_);
    find(library, "ncclRedOpCreatePreMulSum", create_);
    find(library, "ncclRedOpDestroy", destroy_);
  }

  // Enqueues it on `stream`.  The factor of PREMUL_SUM is rounded to the dtype before it is used,
  // that of ringreduce's own all-reduce is not.
  void operator()(const cuda::NcclCommunicator& on, const void* input, void* output, size_t count,
                  DType dtype, ReduceOp op, cuda::NcclStream stream, double factor = 1) const {
    if (!supports(dtype, op))
      throw Error(Failure::kArgument, std::string("NCCL cannot reduce ") + name(dtype) + " by " +
                                          name(op) + "; use another dtype");
    ncclComm* const comm = on.live();
    const int type = typeOf(dtype);
    if (op != ReduceOp::kPremulSum)
      return on.must(all_reduce_(input, output, count, type, opOf(op), comm, stream),
                     "ncclAllReduce");
    constexpr int kScalarOnHost = 1;
    Scalar scalar(dtype, factor);
    int scaled = 0;
    on.must(create_(&scaled, scalar.bytes, type, kScalarOnHost, comm), "ncclRedOpCreatePreMulSum");
    const int result = all_reduce_(input, output, count, type, scaled, comm, stream);
    destroy_(scaled, comm);  // NCCL keeps it as long as an enqueued call needs it
    on.must(result, "ncclAllReduce");
  }

 private:
  template <class F>
  static void find(const cuda::NcclLibrary& library, const char* symbol, F*& function) {
    function = reinterpret_cast<F*>(library.function(symbol));
  }
  int (*all_reduce_)(const void*, void*, size_t, int, int, ncclComm*, cuda::NcclStream) = nullptr;
  int (*create_)(int*, void*, int, int, ncclComm*) = nullptr;
  int (*destroy_)(int, ncclComm*) = nullptr;
};

}  // namespace nccl
