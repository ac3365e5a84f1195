// NCCL, loaded at run time: something to compare with, and a wire between hosts.
//
// It is not linked to NCCL and does not include its header, so one build works with any NCCL, and
// without.  It uses only the part of the interface that is the same from 2.18 to 2.32 (nccl.cc). It
// needs no CUDA header either.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"

struct CUstream_st;  // a cudaStream_t points to one
struct ncclComm;

namespace ringreduce::cuda {

struct NcclFunctions;
using NcclStream = CUstream_st*;

// Identifies a communicator: made by one of its ranks and sent to the others.
using NcclId = std::array<char, 128>;

class NcclLibrary {
 public:
  // Loads the file at `path`; if that is empty, the one that RINGREDUCE_NCCL names, else the one
  // that this process has loaded (torch has), else the system's.  Throws Error(kSetup).
  static std::shared_ptr<const NcclLibrary> load(const std::string& path = "");
  ~NcclLibrary();

  int version() const { return version_; }  // 23003 for 2.30.3
  std::string description() const;          // "NCCL 2.30.3 (/path/of/libnccl.so.2)"

  // Whether it takes several ranks on one GPU, as this process's environment is now.  If it does
  // not, a communicator of such ranks is refused by NCCL; `whyNoSharedGpu` says what to do.
  bool ranksMayShareGpu() const { return whyNoSharedGpu().empty(); }
  std::string whyNoSharedGpu() const;

  NcclId makeId() const;

 private:
  friend class NcclCommunicator;
  friend class NcclGroup;
  NcclLibrary(void* handle, const std::string& name);

  std::unique_ptr<NcclFunctions> functions_;
  std::string file_;
  int version_ = 0;
};

struct NcclOptions {
  // Thread blocks that a rank may use at a time; 0 leaves it to NCCL.  More than two ranks on one
  // GPU need a bound, or their kernels are not all resident and wait for each other for ever.
  int max_blocks = 0;
};

// One rank's part in a communicator of NCCL, on the device that is current when it is made.  Errors
// are Error: kSetup when it is made, kArgument for calls that NCCL cannot perform, kPeerLost,
// kTimeout or kAborted later.
class NcclCommunicator {
 public:
  // Returns when all ranks have called it, each in a thread of its own.
  NcclCommunicator(std::shared_ptr<const NcclLibrary> library, const NcclId& id, int rank,
                   int world_size, const NcclOptions& options = {});
  // All ranks of a group in the calling thread, on one device.
  static std::vector<std::unique_ptr<NcclCommunicator>> makeAll(
      const std::shared_ptr<const NcclLibrary>& library, int world_size,
      const NcclOptions& options = {});
  // Waits for enqueued operations, unless it was aborted.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  int rank() const { return rank_; }
  int worldSize() const { return world_size_; }
  const NcclLibrary& library() const { return *library_; }

  // NCCL cannot reduce every pair of dtype and op that ringreduce can.
  static bool supports(DType dtype, ReduceOp op);

  // They enqueue on `stream`.  The factor of PREMUL_SUM is rounded to the dtype before it is used,
  // that of ringreduce's own all-reduce is not.
  void allReduce(const void* input, void* output, size_t count, DType dtype, ReduceOp op,
                 NcclStream stream, double factor = 1);
  void send(const void* data, size_t bytes, int peer, NcclStream stream);
  void recv(void* data, size_t bytes, int peer, NcclStream stream);

  // Throws if an operation has failed since it was enqueued.
  void check() const;
  // Ends operations under way, kernels too, and frees everything; from any thread, any number of
  // times. No other call may be started at the same time; every later one throws.
  void abort();

 private:
  NcclCommunicator(std::shared_ptr<const NcclLibrary> library, int rank, int world_size);
  void join(const NcclId& id, const NcclOptions& options);
  ncclComm* live() const;
  void must(int result, const char* call) const;

  std::shared_ptr<const NcclLibrary> library_;
  int rank_, world_size_;
  ncclComm* joining_ = nullptr;  // NCCL writes it when a group of calls ends
  std::atomic<ncclComm*> comm_{nullptr};
};

// The calls from its construction to `end` start together.  NCCL wants that of calls for several
// ranks in one thread, and of sends and receives that wait for each other.
class NcclGroup {
 public:
  explicit NcclGroup(const NcclLibrary& library);
  ~NcclGroup();  // ends it, and ignores errors, if an exception came before `end`
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;
  void end();

 private:
  const NcclLibrary& library_;
  bool open_ = true;
};

}  // namespace ringreduce::cuda
