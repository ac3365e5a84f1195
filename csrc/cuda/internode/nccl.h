// NCCL, loaded at run time: a wire between hosts.
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

  NcclId makeId() const;
  // A function of its interface, by name.  Throws Error(kSetup) if it has none.
  void* function(const char* symbol) const;

 private:
  friend class NcclCommunicator;
  friend class NcclGroup;
  NcclLibrary(void* handle, const std::string& name);

  void* handle_;
  std::unique_ptr<NcclFunctions> functions_;
  std::string file_;
  int version_ = 0;
};

// One rank's part in a communicator of NCCL, on the device that is current when it is made.  Errors
// are Error: kSetup when it is made, kArgument for calls that NCCL cannot perform, kPeerLost,
// kTimeout or kAborted later.
class NcclCommunicator {
 public:
  // Returns when all ranks have called it, each in a thread of its own.  In an NcclGroup it returns
  // at once, and is made when that ends.  `most_blocks`: thread blocks that a rank may use at a
  // time; 0 leaves it to NCCL.
  NcclCommunicator(std::shared_ptr<const NcclLibrary> library, const NcclId& id, int rank,
                   int world_size, int most_blocks = 0);
  // Waits for enqueued operations, unless it was aborted.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  int rank() const { return rank_; }
  int worldSize() const { return world_size_; }
  const NcclLibrary& library() const { return *library_; }

  // They enqueue on `stream`.
  void send(const void* data, size_t bytes, int peer, NcclStream stream);
  void recv(void* data, size_t bytes, int peer, NcclStream stream);

  // For other calls of NCCL: the communicator, and what their results mean.  Throw if it was
  // aborted, or the result is none of success.
  ncclComm* live() const;
  void must(int result, const char* call) const;

  // Throws if an operation has failed since it was enqueued.
  void check() const;
  // Ends operations under way, kernels too, and frees everything; from any thread, any number of
  // times. No other call may be started at the same time; every later one throws.
  void abort();

 private:
  std::shared_ptr<const NcclLibrary> library_;
  int rank_, world_size_;
  ncclComm* comm_ = nullptr;
  std::atomic<bool> is_freed_ = false;
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
