// The collectives of ranks with GPUs, on one host or several.
//
// A call puts work into a stream and returns.  All ranks make the same calls in the same order;
// calls in several streams of one rank run one after the other, but the user orders replays of CUDA
// graphs. wait, check and the next call raise a later failure, one of the group's four errors.  The
// outputs of failed operations are full of NaN, or 0 if they are integers, unless ranks disagreed
// and had run them before that was found.  After an error make a new group.
//
// HostCommunicator implements it for the ranks of one host, InterNodeCommunicator for several
// hosts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/dtype.h"
#include "cuda/kernels/collective_kernel.h"
#include "epoch/recorder.h"
#include "transport/shm/page.h"

struct CUstream_st;  // cudaStream_t is a pointer to one

namespace ringreduce::cuda {

// The algorithms that a user can choose (RINGREDUCE_CUDA_ALGORITHM).  kAuto: gpu_tuning.h decides.
// It never takes kNvls, since the NVSwitch adds in an order of its own (nvls.h).
enum class Choice : uint8_t { kAuto, kDirect, kOneShot, kTwoShot, kRing, kLL, kLocated, kNvls };
inline constexpr const char* kChoiceNames[] = {"auto", "direct", "oneshot", "twoshot",
                                               "ring", "ll",     "located", "nvls"};
std::optional<Choice> choiceNamed(const std::string& name);

// Choices of kernels that wait for their peers come after the others, as DeviceAlgorithm lists
// them.  LL is a way to do one-shot, where there is a kernel for it.  "located" and "nvls" are ways
// to do two-shot.
constexpr Choice choiceOf(DeviceAlgorithm algorithm) {
  return static_cast<Choice>(static_cast<int>(Choice::kOneShot) + static_cast<int>(algorithm));
}
constexpr DeviceAlgorithm kernelOf(Choice choice) {
  if (choice == Choice::kLL) return DeviceAlgorithm::kOneShot;
  if (choice == Choice::kLocated || choice == Choice::kNvls) return DeviceAlgorithm::kTwoShot;
  return static_cast<DeviceAlgorithm>(static_cast<int>(choice) -
                                      static_cast<int>(Choice::kOneShot));
}
static_assert(choiceOf(DeviceAlgorithm::kTwoShot) == Choice::kTwoShot &&
              kernelOf(Choice::kRing) == DeviceAlgorithm::kRing);

// Follows this rank's errors about a call, in parentheses: "DDP bucket 2 with ...".  Called only
// for an error, in any thread.  May be null.
using Label = std::function<std::string()>;

struct GpuAllReduce {
  const void* input;  // device memory
  void* output;       // may be the input
  size_t count;
  DType dtype;
  ReduceOp op;
  double factor = 1;                       // PREMUL_SUM
  const void* factor_on_device = nullptr;  // the same, of float64 for float64 and else float32
  Nanos timeout = 0;                       // from when its kernel runs; 0: the group's
  std::optional<Choice> algorithm = std::nullopt;  // for this call; the same on all ranks
  Label label = {};
  uint64_t borders = 0;  // of the tensors in `input` (bordersOf), the same on all ranks
};

// Throws Error(kArgument) for calls that no communicator can perform.
void validate(const GpuAllReduce& call);

// Rank r gets the sum of all ranks' r-th parts.
struct GpuReduceScatter {
  const void* input;  // size() parts of `count` elements
  void* output;       // one part; may be the own part of the input, and not overlap it otherwise
  size_t count;
  DType dtype;
  ReduceOp op;
  double factor = 1;                       // PREMUL_SUM
  const void* factor_on_device = nullptr;  // as GpuAllReduce's
  Nanos timeout = 0;
  Label label = {};
};

// Every rank gathers all inputs.  Of any dtype.
struct GpuAllGather {
  const void* input;  // `count` elements; may be the own part of the output
  void* output;       // size() parts of as many
  size_t count;
  DType dtype;
  Nanos timeout = 0;
  Label label = {};
};

// Every rank gets the root's elements.  Of any dtype.  The root's own are only read, and never
// poisoned.
struct GpuBroadcast {
  void* data;
  size_t count;
  DType dtype;
  int root;
  Nanos timeout = 0;
  Label label = {};
};

class GpuCommunicator {
 public:
  // Waits for its operations in streams, a few seconds at most.
  virtual ~GpuCommunicator() = default;

  // Whether it performs calls of a kind; the same on all ranks.
  virtual bool performs(Kind kind) const = 0;

  // They throw Error(kArgument) before anything is put into the stream.
  virtual void allReduce(const GpuAllReduce& call, CUstream_st* stream) = 0;
  virtual void reduceScatter(const GpuReduceScatter& call, CUstream_st* stream) = 0;
  virtual void allGather(const GpuAllGather& call, CUstream_st* stream) = 0;
  virtual void broadcast(const GpuBroadcast& call, CUstream_st* stream) = 0;

  // Whether it calls NCCL, which must not happen within the caller's own group of NCCL calls.
  virtual bool callsNccl() const { return false; }

  // Whether calls on so many bytes use a tensor where it is, if it lies in own memory
  // (memory/own_memory.h); the same on all ranks.  Ranks need not agree on tensors.
  virtual bool usesOwnMemory(size_t /*bytes*/) const { return false; }
  // Whether kernels of all ranks can use this memory where it is, by now.
  virtual bool isMapped(const void* /*data*/, size_t /*bytes*/) const { return false; }

  // What its kernels know of a failure, in device memory, which is kept as long as this is.  A call
  // that fails sets found_inf before the output can be used, in streams and in replayed graphs.
  virtual std::shared_ptr<Local> local() const = 0;
  // Throws the group's error if there is one.
  virtual void check() = 0;
  // Waits until everything put into streams so far is done; false if `longest` goes by first.
  // Throws the group's error if there is one then.
  virtual bool wait(Nanos longest = kNever) = 0;
  // Ends the group for all ranks: waits of kernels and streams end, outputs are poisoned.
  virtual void abort(const std::string& why) = 0;

  virtual size_t bytes() const = 0;  // of device memory held

  // Records of its operations, as Recorder::since; then of those that are not over.  Calls of
  // replayed CUDA graphs have none.
  virtual std::vector<OpRecord> records(uint64_t since) const = 0;
  virtual void addTo(Totals& totals) const = 0;  // as Recorder::addTo, of the same operations
};

}  // namespace ringreduce::cuda
