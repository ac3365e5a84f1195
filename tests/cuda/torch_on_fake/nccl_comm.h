// A rank of a communicator of the fake's NCCL, and how its calls get into streams.
#pragma once

#include <cuda_runtime_api.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "nccl_calls.h"

// Never freed, so that calls on a destroyed one are noticed.
struct ncclComm {
  enum class State { kJoining, kLive, kFinalized, kLeft };
  struct Scale {
    int dtype;
    fake::nccl::Factor factor;
  };

  int rank, size, device;
  std::string name;
  std::shared_ptr<fake::nccl::Wire> wire = nullptr;

  std::mutex mutex = {};  // of all below
  std::condition_variable changed = {};
  State state = State::kJoining;
  int pending = 0;  // put into streams, and not done yet
  std::map<int, Scale> ops = {};
  int next_op = fake::nccl::kOps, splits = 0;
  cudaStream_t last = nullptr;
  cudaEvent_t tail = nullptr;  // behind the last work in it

  std::mutex performing = {};
};

namespace fake::nccl {

// The communicator, if calls can be made with it.  Throws Failed; a call with one that was given
// back is punished.
// `finalized`: so far it may be.
ncclComm& usable(ncclComm* comm, const char* call, bool finalized = false);

// Where a rank belongs.
struct Seat {
  std::string name;  // of the communicator: its ranks' only
  int rank, size;
};
// Joins, or does so at the end of the group that the thread has begun; `find_seat` is called then,
// and may wait for other ranks.
void joinSoon(ncclComm* comm, std::function<Seat()> find_seat);

// Puts it into the stream, or does so at the end of the group that the thread has begun.
void enqueue(ncclComm* comm, const char* name, Call call, cudaStream_t stream);

void beginGroup();
Result endGroup();
// Of the group that the thread has begun: what its end will say.
void groupFailed(Result result);

// Waits for streams; `abort` ends that.
void leave(ncclComm* comm, bool abort);

int version();

}  // namespace fake::nccl
