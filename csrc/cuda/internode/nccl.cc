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

namespace ringreduce::cuda {
namespace {

constexpr int kOldestVersion = 21800;
constexpr const char* kLibrary = "libnccl.so.2";

// Results.
constexpr int kSuccess = 0;
constexpr int kInvalidArgument = 4;
constexpr int kInvalidUsage = 5;
constexpr int kRemoteError = 6;
constexpr int kTimedOut = 8;  // since 2.30

constexpr int kBytes = 0;  // the dtype of bytes that are only moved: int8

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

}  // namespace

// (name here, name in the library, result, arguments)
#define RINGREDUCE_NCCL_FUNCTIONS(F)                                                            \
  F(getVersion, ncclGetVersion, int, (int*))                                                    \
  F(getUniqueId, ncclGetUniqueId, int, (UniqueId*))                                             \
  F(commInitRankConfig, ncclCommInitRankConfig, int, (ncclComm**, int, UniqueId, int, Config*)) \
  F(commDestroy, ncclCommDestroy, int, (ncclComm*))                                             \
  F(commAbort, ncclCommAbort, int, (ncclComm*))                                                 \
  F(commGetAsyncError, ncclCommGetAsyncError, int, (ncclComm*, int*))                           \
  F(getErrorString, ncclGetErrorString, const char*, (int))                                     \
  F(getLastError, ncclGetLastError, const char*, (ncclComm*))                                   \
  F(send, ncclSend, int, (const void*, size_t, int, int, ncclComm*, NcclStream))                \
  F(recv, ncclRecv, int, (void*, size_t, int, int, ncclComm*, NcclStream))                      \
  F(groupStart, ncclGroupStart, int, ())                                                        \
  F(groupEnd, ncclGroupEnd, int, ())

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
    : handle_(handle), functions_(std::make_unique<NcclFunctions>()), file_(name) {
  NcclFunctions& f = *functions_;
#define RINGREDUCE_RESOLVE(member, symbol, result, arguments) \
  f.member = reinterpret_cast<decltype(f.member)>(function(#symbol));
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

void* NcclLibrary::function(const char* symbol) const {
  if (void* found = dlsym(handle_, symbol)) return found;
  throw Error(Failure::kSetup, file_ + " is no NCCL that can be used: it has no " + symbol +
                                   "; name a libnccl.so.2 of version " +
                                   versionText(kOldestVersion) + " or newer with RINGREDUCE_NCCL");
}

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

NcclId NcclLibrary::makeId() const {
  UniqueId id{};
  const int result = functions_->getUniqueId(&id);
  if (result != kSuccess)
    throw Error(Failure::kSetup, functions_->explain("ncclGetUniqueId", result, description()));
  return std::to_array(id.bytes);
}

// --- A rank --------------------------------------------------------------------------------------

NcclCommunicator::NcclCommunicator(std::shared_ptr<const NcclLibrary> library, const NcclId& id,
                                   int rank, int world_size, int most_blocks)
    : library_(std::move(library)), rank_(rank), world_size_(world_size) {
  UniqueId unique;
  static_assert(sizeof unique == sizeof id);
  std::copy(id.begin(), id.end(), unique.bytes);
  Config config;
  if (most_blocks > 0) config.max_blocks = most_blocks;
  const auto& f = *library_->functions_;
  const int result = f.commInitRankConfig(&comm_, world_size_, unique, rank_, &config);
  if (result != kSuccess)
    throw Error(Failure::kSetup,
                "rank " + std::to_string(rank_) + " of " + std::to_string(world_size_) + ": " +
                    f.explain("ncclCommInitRankConfig", result, library_->description()));
}

NcclCommunicator::~NcclCommunicator() {
  // An error here was thrown before.
  if (!is_freed_.exchange(true) && comm_) library_->functions_->commDestroy(comm_);
}

void NcclCommunicator::abort() {
  if (!is_freed_.exchange(true) && comm_) library_->functions_->commAbort(comm_);
}

ncclComm* NcclCommunicator::live() const {
  if (is_freed_ || !comm_)
    throw Error(Failure::kAborted,
                "rank " + std::to_string(rank_) + " of " + std::to_string(world_size_) +
                    ": this communicator of NCCL was aborted, or is not made yet; make a new one");
  return comm_;
}

void NcclCommunicator::must(int result, const char* call) const {
  if (result == kSuccess) return;
  throw Error(kindOf(result),
              "rank " + std::to_string(rank_) + " of " + std::to_string(world_size_) + ": " +
                  library_->functions_->explain(call, result, library_->description()));
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
