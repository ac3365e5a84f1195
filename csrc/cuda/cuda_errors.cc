// Names, advice, and the list of errors that end a process's use of CUDA.
#include "cuda/cuda_errors.h"

#include <algorithm>
#include <iterator>

#include "base/error.h"

namespace ringreduce::cuda {
namespace {

// CUDA's headers (driver_types.h) say of these that the process must be terminated and relaunched,
// except for the two marked "ours": an uncorrectable hardware error, after which nothing that the
// GPU holds can be trusted.  Numbers, since older headers lack some of the names.
struct Ruin {
  int code;
  const char* reason;
};
constexpr Ruin kRuins[] = {
    {214, "GPU memory has lost data (an uncorrectable ECC error)"},  // ours: ECCUncorrectable
    {220, "an NVLink between GPUs has lost data"},                   // ours: NvlinkUncorrectable
    {226, "the GPU contained a hardware error or a bad access to another GPU's memory"},
    {700, "a kernel touched memory that is not mapped"},
    {702, "a kernel ran longer than the limit that this GPU has for kernels"},
    {710, "an assert in a kernel failed"},
    {714, "the call stack of a kernel is corrupt or too large"},
    {715, "a kernel came to an instruction that the GPU does not know"},
    {716, "a kernel touched memory at an address that is not aligned"},
    {717, "a kernel used an instruction on memory of a kind that it is not for"},
    {718, "a kernel jumped to where no code is"},
    {719, "a kernel failed (an invalid pointer, as a rule)"},
    {721, "a kernel ended without giving its tensor memory back"},
    {810, "the MPS server ended this process's use of the GPU (another client's fault, as a rule)"},
    {911, "a device outside of CUDA, for which the GPU waited, reported an error"},
};

// Advice for errors that come from a machine and its settings.
const char* adviceFor(int code) {
  switch (code) {
    case cudaErrorMemoryAllocation:
      return "Free GPU memory: smaller batches, fewer processes on this GPU (nvidia-smi lists "
             "them)";
    case cudaErrorInsufficientDriver:
    case cudaErrorStubLibrary:
      return "This machine has no NVIDIA driver, or one older than the CUDA that ringreduce was "
             "built with: install a newer one (nvidia-smi shows it), or keep to CPU tensors";
    case cudaErrorCallRequiresNewerDriver:
      return "Install a newer NVIDIA driver (nvidia-smi shows the one that is there)";
    case cudaErrorNoDevice:
      return "No GPU can be seen: is CUDA_VISIBLE_DEVICES empty, does nvidia-smi list one, was the "
             "container started with GPUs?";
    case cudaErrorInvalidDevice:
      return "There is no such GPU in this process; CUDA_VISIBLE_DEVICES says which there are";
    case cudaErrorDevicesUnavailable:
      return "The GPU is taken: by a process that has it for itself (nvidia-smi -q -d COMPUTE "
             "shows "
             "its compute mode), or by kernels that do not end";
    case cudaErrorInitializationError:
      return "CUDA cannot be used in a process that was forked from one that has used it: start "
             "ranks with spawn, or fork before the first use";
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
      return "ringreduce was built for other GPUs (python -m ringreduce.config says for which): "
             "build it again on this machine with RINGREDUCE_CUDA_ARCHS=native in the environment, "
             "or with RINGREDUCE_CUDA_ARCHS=all for several machines";
    case cudaErrorSystemDriverMismatch:
    case cudaErrorCompatNotSupportedOnDevice:
      return "The driver's kernel module and its libraries are of different versions: reboot, or "
             "install them again";
    case cudaErrorSystemNotReady:
      return "The system's GPU services are not ready: on machines with NVSwitch the fabric "
             "manager "
             "must run";
    case cudaErrorMpsConnectionFailed:
    case cudaErrorMpsRpcFailure:
    case cudaErrorMpsServerNotReady:
    case cudaErrorMpsMaxClientsReached:
    case cudaErrorMpsMaxConnectionsReached:
      return "The CUDA MPS service does not serve this process: look at its log, restart it, or "
             "unset CUDA_MPS_PIPE_DIRECTORY to go without";
    case cudaErrorNotSupported:
    case cudaErrorNotPermitted:
      return "This GPU, driver or container does not allow it";
    default:
      return nullptr;
  }
}

std::string told(int code, const std::string& name, const std::string& text, std::string_view tried,
                 int device) {
  std::string message = "cannot " + std::string(tried);
  if (device >= 0) message += " on GPU " + std::to_string(device);
  message += ": " + name + " (" + text + ")";
  if (const char* reason = ruinOf(code))
    message += std::string(". ") + reason +
               "; after this error CUDA works no more in this process: end it and start it again";
  else if (const char* advice = adviceFor(code))
    message += std::string(". ") + advice;
  return message;
}

// The calling thread's device if none is named; -1 if it is not known.
int named(int device) {
  if (device != kCurrentDevice) return device;
  int current = -1;
  if (cudaGetDevice(&current) != cudaSuccess) {
    (void)cudaGetLastError();
    return -1;
  }
  return current;
}

template <class Result>
void tell(Result result, std::string_view tried, int device) noexcept {
  const int code = result;
  if (code == 0 || code == cudaErrorCudartUnloading || ruinOf(code)) return;
  try {
    log(describe(result, tried, device));
  } catch (const std::exception&) {
    log("a call of CUDA failed with error " + std::to_string(code));
  }
}

}  // namespace

const char* ruinOf(int code) {
  const auto found = std::find_if(std::begin(kRuins), std::end(kRuins),
                                  [&](const Ruin& ruin) { return ruin.code == code; });
  return found == std::end(kRuins) ? nullptr : found->reason;
}

bool CudaError::ruinsProcess() const {
  return ruinOf(code()) != nullptr;
}

std::string describe(cudaError_t error, std::string_view tried, int device) {
  return told(error, cudaGetErrorName(error), cudaGetErrorString(error), tried, named(device));
}

std::string describe(CUresult error, std::string_view tried, int device) {
  const char *name = nullptr, *text = nullptr;
  driver().getErrorName(error, &name);
  driver().getErrorString(error, &text);
  return told(error, name ? name : "CUDA error " + std::to_string(error),
              text ? text : "an error that this driver does not know", tried, named(device));
}

void raise(cudaError_t error, std::string_view tried, int device, Failure kind) {
  (void)cudaGetLastError();
  throw CudaError(kind, error, describe(error, tried, device));
}

void raise(CUresult error, std::string_view tried, int device, Failure kind) {
  throw CudaError(kind, error, describe(error, tried, device));
}

void checkQuietly(cudaError_t result, std::string_view tried, int device) noexcept {
  if (result == cudaSuccess) return;
  (void)cudaGetLastError();
  tell(result, tried, device);
}

void checkQuietly(CUresult result, std::string_view tried, int device) noexcept {
  tell(result, tried, device);
}

// ---- CUDA's driver

namespace {

void* find(const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult answer = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &answer);
#else
  // The newest interface that this runtime knows, which is the one of `version`.
  (void)version;
  const cudaError_t error = cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &answer);
#endif
  check(error, "find the CUDA driver's functions", kNoDevice);
  if (answer == cudaDriverEntryPointSuccess && function) return function;
  int has = 0;
  check(cudaDriverGetVersion(&has), "ask for the CUDA driver's version", kNoDevice);
  throw CudaError(Failure::kSetup, cudaErrorCallRequiresNewerDriver,
                  std::string("the CUDA driver has no ") + name + "; it is for CUDA " +
                      std::to_string(has / 1000) + "." + std::to_string(has % 1000 / 10) +
                      ": install a newer one (nvidia-smi shows it)");
}

#define RINGREDUCE_FIND(member, function, version) \
  d.member = reinterpret_cast<decltype(d.member)>(find(#function, version));
Driver findAll() {
  Driver d{};
  RINGREDUCE_DRIVER_FUNCTIONS(RINGREDUCE_FIND)
  return d;
}
MulticastDriver findMulticast() {
  MulticastDriver d{};
  RINGREDUCE_MULTICAST_FUNCTIONS(RINGREDUCE_FIND)
  return d;
}
#undef RINGREDUCE_FIND

}  // namespace

const Driver& driver() {
  static const Driver all = findAll();  // one that throws is tried again at the next call
  return all;
}

const MulticastDriver& multicastDriver() {
  static const MulticastDriver all = findMulticast();
  return all;
}

}  // namespace ringreduce::cuda
