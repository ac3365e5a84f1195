// Finds NCCL and calls it.
//
// The declarations are our own: the part of NCCL's interface that is used, as it is from 2.18
// to 2.32 (the headers of 2.18.1, 2.28.9, 2.30.3 and 2.32.3 were compared).  A unique id is 128
// bytes, passed by value.  Results, dtypes and ops are C enums, so ints, whose values have kept
// their meaning.  A config begins with its own size, which tells NCCL the members that the caller
// can have set.
#include "cuda/internode/nccl.h"

#include <dlfcn.h>

#include <climits>
#include <cstdint>
#include <cstdlib>
#include <utility>

#include "base/config.h"
#include "base/error.h"
#include "kernels/reduce.h"

namespace ringreduce::cuda {
namespace {

constexpr int kOldestVersion = 21800;
constexpr int kFirstToShareGpus = 23000;
constexpr const char* kLibrary = "libnccl.so.2";
constexpr const char* kSharingVariable = "NCCL_MULTI_RANK_GPU_ENABLE";

// Results.
constexpr int kSuccess = 0;
constexpr int kInvalidArgument = 4;
constexpr int kInvalidUsage = 5;
constexpr int kRemoteError = 6;
constexpr int kTimedOut = 8;  // since 2.30

constexpr int kUnsupported = -1;
constexpr int kBytes = 0;  // the dtype of bytes that are only moved: int8
constexpr int kScalarOnHost = 1;

struct UniqueId {
  char bytes[sizeof(NcclId)];
};

// As 2.18 had it.
struct Config {
  static constexpr int kUnset = INT_MIN;
  size_t size = sizeof(Config);
  unsigned int magic = 0xcafebeef;
  unsigned int version = kOldestVersion;
  int blocking = 1;
  int cluster_size = kUnset;
  int min_blocks = kUnset;
  int max_blocks = kUnset;
  const char* network = nullptr;
  int share_on_split = kUnset;
};

int typeOf(DType dtype) {
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
int opOf(ReduceOp op) {
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

Failure kindOf(int result) {
  switch (result) {
    case kInvalidArgument:
    case kInvalidUsage:
      return Failure::kArgument;
    case kRemoteError:
      return Failure::kPeerLost;
    case kTimedOut:
      return Failure::kTimeout;
    default:
      return Failure::kAborted;
  }
}

std::string versionText(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

template <class F>
void resolve(void* handle, const std::string& library, const char* symbol, F*& function) {
  function = reinterpret_cast<F*>(dlsym(handle, symbol));
  if (!function)
    throw Error(Failure::kSetup, library + " is no NCCL that can be used: it has no " + symbol +
                                     "; name a libnccl.so.2 of version " +
                                     versionText(kOldestVersion) +
                                     " or newer with RINGREDUCE_NCCL");
}

}  // namespace

// (name here, name in the library, result, arguments)
#define RINGREDUCE_NCCL_FUNCTIONS(F)                                                              \
  F(getVersion, ncclGetVersion, int, (int*))                                                      \
  F(getUniqueId, ncclGetUniqueId, int, (UniqueId*))                                               \
  F(commInitRankConfig, ncclCommInitRankConfig, int, (ncclComm**, int, UniqueId, int, Config*))   \
  F(commDestroy, ncclCommDestroy, int, (ncclComm*))                                               \
  F(commAbort, ncclCommAbort, int, (ncclComm*))                                                   \
  F(commGetAsyncError, ncclCommGetAsyncError, int, (ncclComm*, int*))                             \
  F(getErrorString, ncclGetErrorString, const char*, (int))                                       \
  F(getLastError, ncclGetLastError, const char*, (ncclComm*))                                     \
  F(allReduce, ncclAllReduce, int, (const void*, void*, size_t, int, int, ncclComm*, NcclStream)) \
  F(send, ncclSend, int, (const void*, size_t, int, int, ncclComm*, NcclStream))                  \
  F(recv, ncclRecv, int, (void*, size_t, int, int, ncclComm*, NcclStream))                        \
  F(groupStart, ncclGroupStart, int, ())                                                          \
  F(groupEnd, ncclGroupEnd, int, ())                                                              \
  F(redOpCreatePreMulSum, ncclRedOpCreatePreMulSum, int, (int*, void*, int, int, ncclComm*))      \
  F(redOpDestroy, ncclRedOpDestroy, int, (int, ncclComm*))

struct NcclFunctions {
#define RINGREDUCE_MEMBER(member, symbol, result, arguments) result(*member) arguments;
  RINGREDUCE_NCCL_FUNCTIONS(RINGREDUCE_MEMBER)
#undef RINGREDUCE_MEMBER

  // The text of a result other than success.
  std::string explain(const char* call, int result, const std::string& library) const {
    std::string text = std::string(call) + " failed in " + library + ": " + getErrorString(result);
    const char* last = getLastError(nullptr);
    if (last && *last) text += "; its last message: " + std::string(last);
    return text + ". Run with NCCL_DEBUG=WARN to see all that NCCL says";
  }
};

// --- The library ---------------------------------------------------------------------------------

NcclLibrary::NcclLibrary(void* handle, const std::string& name)
    : functions_(std::make_unique<NcclFunctions>()), file_(name) {
  NcclFunctions& f = *functions_;
#define RINGREDUCE_RESOLVE(member, symbol, result, arguments) \
  resolve(handle, name, #symbol, f.member);
  RINGREDUCE_NCCL_FUNCTIONS(RINGREDUCE_RESOLVE)
#undef RINGREDUCE_RESOLVE

  Dl_info where{};
  if (dladdr(reinterpret_cast<void*>(f.getVersion), &where) && where.dli_fname)
    file_ = where.dli_fname;
  const int result = f.getVersion(&version_);
  if (result != kSuccess) throw Error(Failure::kSetup, f.explain("ncclGetVersion", result, file_));
  if (version_ < kOldestVersion)
    throw Error(Failure::kSetup, description() + " is too old: name a libnccl.so.2 of version " +
                                     versionText(kOldestVersion) +
                                     " or newer with RINGREDUCE_NCCL");
}

NcclLibrary::~NcclLibrary() = default;

std::shared_ptr<const NcclLibrary> NcclLibrary::load(const std::string& path) {
  constexpr int kMode = RTLD_NOW | RTLD_LOCAL;
  const std::string asked = path.empty() ? ringreduce::Config::read().nccl.get() : path;
  const std::string name = asked.empty() ? kLibrary : asked;
  void* handle = nullptr;
  if (asked.empty()) {
    // A torch that has NCCL inside itself exports its functions.
    handle = dlopen(kLibrary, kMode | RTLD_NOLOAD);
    if (!handle) {
      handle = dlopen("libtorch_cuda.so", kMode | RTLD_NOLOAD);
      if (handle && !dlsym(handle, "ncclGetVersion")) {
        dlclose(handle);
        handle = nullptr;
      }
    }
  }
  if (!handle) handle = dlopen(name.c_str(), kMode);
  if (!handle) {
    const char* why = dlerror();
    const std::string source = !path.empty()    ? ""
                               : !asked.empty() ? " (named by RINGREDUCE_NCCL)"
                                                : " (the system's)";
    throw Error(Failure::kSetup, "NCCL could not be loaded from " + name + source + ": " +
                                     (why ? why : "no reason given") +
                                     ". Name a libnccl.so.2 with RINGREDUCE_NCCL; the Python "
                                     "package nvidia-nccl-cu13 has one in nvidia/nccl/lib");
  }
  // NCCL stays loaded: its threads and its registrations with CUDA live until the process ends.
  try {
    return std::shared_ptr<const NcclLibrary>(new NcclLibrary(handle, name));
  } catch (const Error&) {
    dlclose(handle);
    throw;
  }
}

std::string NcclLibrary::description() const {
  return "NCCL " + versionText(version_) + " (" + file_ + ")";
}

std::string NcclLibrary::whyNoSharedGpu() const {
  if (version_ < kFirstToShareGpus)
    return description() + " refuses ranks that share a GPU: name a libnccl.so.2 of version " +
           versionText(kFirstToShareGpus) + " or newer with RINGREDUCE_NCCL";
  if (!ringreduce::Config::read().nccl_shares_gpus)
    return description() + " takes ranks that share a GPU only with " + kSharingVariable +
           "=1: set it before the program starts";
  return "";
}

NcclId NcclLibrary::makeId() const {
  UniqueId id{};
  const int result = functions_->getUniqueId(&id);
  if (result != kSuccess)
    throw Error(Failure::kSetup, functions_->explain("ncclGetUniqueId", result, description()));
  return std::to_array(id.bytes);
}

// --- A rank --------------------------------------------------------------------------------------

NcclCommunicator::NcclCommunicator(std::shared_ptr<const NcclLibrary> library, int rank,
                                   int world_size)
    : library_(std::move(library)), rank_(rank), world_size_(world_size) {}

NcclCommunicator::NcclCommunicator(std::shared_ptr<const NcclLibrary> library, const NcclId& id,
                                   int rank, int world_size, const NcclOptions& options)
    : NcclCommunicator(std::move(library), rank, world_size) {
  join(id, options);
  comm_ = joining_;
}

std::vector<std::unique_ptr<NcclCommunicator>> NcclCommunicator::makeAll(
    const std::shared_ptr<const NcclLibrary>& library, int world_size, const NcclOptions& options) {
  if (world_size > 1)
    if (const std::string why = library->whyNoSharedGpu(); !why.empty())
      throw Error(Failure::kSetup, why);
  // Not ncclCommInitAll: that one refuses a device that is named twice, in every version.
  const NcclId id = library->makeId();
  std::vector<std::unique_ptr<NcclCommunicator>> all;
  NcclGroup group(*library);
  for (int rank = 0; rank < world_size; ++rank) {
    all.emplace_back(new NcclCommunicator(library, rank, world_size));
    all.back()->join(id, options);
  }
  group.end();
  for (auto& one : all) one->comm_ = one->joining_;
  return all;
}

void NcclCommunicator::join(const NcclId& id, const NcclOptions& options) {
  UniqueId unique;
  static_assert(sizeof unique == sizeof id);
  std::copy(id.begin(), id.end(), unique.bytes);
  Config config;
  if (options.max_blocks > 0) config.max_blocks = options.max_blocks;
  const auto& f = *library_->functions_;
  const int result = f.commInitRankConfig(&joining_, world_size_, unique, rank_, &config);
  if (result != kSuccess)
    throw Error(Failure::kSetup,
                "rank " + std::to_string(rank_) + " of " + std::to_string(world_size_) + ": " +
                    f.explain("ncclCommInitRankConfig", result, library_->description()));
}

NcclCommunicator::~NcclCommunicator() {
  // An error here was thrown before.
  if (ncclComm* comm = comm_.exchange(nullptr)) library_->functions_->commDestroy(comm);
}

void NcclCommunicator::abort() {
  if (ncclComm* comm = comm_.exchange(nullptr)) library_->functions_->commAbort(comm);
}

ncclComm* NcclCommunicator::live() const {
  ncclComm* comm = comm_.load();
  if (!comm)
    throw Error(Failure::kAborted, "rank " + std::to_string(rank_) + " of " +
                                       std::to_string(world_size_) +
                                       ": this communicator of NCCL was aborted; make a new one");
  return comm;
}

void NcclCommunicator::must(int result, const char* call) const {
  if (result == kSuccess) return;
  throw Error(kindOf(result),
              "rank " + std::to_string(rank_) + " of " + std::to_string(world_size_) + ": " +
                  library_->functions_->explain(call, result, library_->description()));
}

bool NcclCommunicator::supports(DType dtype, ReduceOp op) {
  return typeOf(dtype) != kUnsupported && isSupported(dtype, op) &&
         (opOf(op) != kUnsupported || op == ReduceOp::kPremulSum);
}

void NcclCommunicator::allReduce(const void* input, void* output, size_t count, DType dtype,
                                 ReduceOp op, NcclStream stream, double factor) {
  if (!supports(dtype, op))
    throw Error(Failure::kArgument, "rank " + std::to_string(rank_) + " of " +
                                        std::to_string(world_size_) + ": NCCL cannot reduce " +
                                        name(dtype) + " by " + name(op) +
                                        "; ringreduce's own all-reduce can, or use another dtype");
  const auto& f = *library_->functions_;
  ncclComm* const comm = live();
  const int type = typeOf(dtype);
  if (op != ReduceOp::kPremulSum) {
    must(f.allReduce(input, output, count, type, opOf(op), comm, stream), "ncclAllReduce");
    return;
  }
  Scalar scalar(dtype, factor);
  int scaled = 0;
  must(f.redOpCreatePreMulSum(&scaled, scalar.bytes, type, kScalarOnHost, comm),
       "ncclRedOpCreatePreMulSum");
  const int result = f.allReduce(input, output, count, type, scaled, comm, stream);
  f.redOpDestroy(scaled, comm);  // NCCL keeps it as long as an enqueued call needs it
  must(result, "ncclAllReduce");
}

void NcclCommunicator::send(const void* data, size_t bytes, int peer, NcclStream stream) {
  must(library_->functions_->send(data, bytes, kBytes, peer, live(), stream), "ncclSend");
}

void NcclCommunicator::recv(void* data, size_t bytes, int peer, NcclStream stream) {
  must(library_->functions_->recv(data, bytes, kBytes, peer, live(), stream), "ncclRecv");
}

void NcclCommunicator::check() const {
  int error = kSuccess;
  must(library_->functions_->commGetAsyncError(live(), &error), "ncclCommGetAsyncError");
  must(error, "an operation on the GPU");
}

// --- Calls together ------------------------------------------------------------------------------

NcclGroup::NcclGroup(const NcclLibrary& library) : library_(library) {
  const auto& f = *library_.functions_;
  const int result = f.groupStart();
  if (result != kSuccess)
    throw Error(kindOf(result), f.explain("ncclGroupStart", result, library_.description()));
}

NcclGroup::~NcclGroup() {
  if (open_) library_.functions_->groupEnd();
}

void NcclGroup::end() {
  open_ = false;
  const auto& f = *library_.functions_;
  const int result = f.groupEnd();
  if (result != kSuccess)
    throw Error(kindOf(result), f.explain("ncclGroupEnd", result, library_.description()));
}

}  // namespace ringreduce::cuda
