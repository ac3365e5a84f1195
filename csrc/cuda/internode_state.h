// What a communicator of several hosts holds; for the files that implement it.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "base/error.h"
#include "base/fd.h"
#include "cuda/communicator_state.h"
#include "cuda/internode_communicator.h"
#include "cuda/kernels.h"
#include "cuda/nccl_ring.h"
#include "cuda/remote_ranks.h"
#include "transport/shm/segment.h"

namespace ringreduce::cuda {

// The text of a group's error without what Session adds: the group, who noticed it, what to do.
std::string causeOf(const std::string& text);

// What the host sets and kernels see.
struct Signals {
  alignas(kLine) uint64_t abort;
  alignas(kLine) uint64_t delivered;
};

struct InterNodeCommunicator::State {
  State(std::shared_ptr<Group> all, const Hosts& of, std::shared_ptr<Group> here,
        std::shared_ptr<GpuCommunicator> communicator, int on);

  // The end of a call, which comes into the stream only after the watchdog has been told of it.
  class Pending {
   public:
    // Null: there is nothing to wait for.
    void set(std::shared_ptr<Event> done) {
      const std::lock_guard lock(mutex_);
      done_ = std::move(done);
      is_set_ = true;
    }
    bool isOver() {
      std::shared_ptr<Event> done;
      {
        const std::lock_guard lock(mutex_);
        if (!is_set_) return false;
        done = done_;
      }
      return !done || done->isReached();
    }

   private:
    std::mutex mutex_;
    std::shared_ptr<Event> done_;
    bool is_set_ = false;
  };

  // The first rank of each rail, for the others.
  int maker() const { return hierarchical ? hosts.ranksOn(0)[static_cast<size_t>(rail)] : 0; }
  void join();
  void sumInParts(const GpuAllReduce& call, cudaStream_t stream);
  void sumWhole(const GpuAllReduce& call, cudaStream_t stream);
  void between(void* data, size_t count, const GpuAllReduce& call, cudaStream_t stream);
  void overAll(const GpuAllReduce& call, cudaStream_t stream);
  void put(const GpuAllReduce& call, cudaStream_t stream);
  void finish(Pending& pending, cudaStream_t stream);
  [[noreturn]] void giveUp(const GpuAllReduce& call, const Error& why, Pending& pending,
                           cudaStream_t stream);
  void follow(cudaStream_t stream);
  void deliver(const GpuAllReduce& call, cudaStream_t stream);
  std::string ncclError();
  void checkHost();
  void endWaits(const std::string& why);

  // From now on the end of each call poisons its output.
  void poison() {
    auto& signals_here = *reinterpret_cast<Signals*>(segment->data());
    std::atomic_ref(signals_here.abort).store(1, std::memory_order_release);
  }
  Signals* onDevice() const { return reinterpret_cast<Signals*>(signals->data()); }
  Nanos timeoutOf(const GpuAllReduce& call) const {
    return call.timeout > 0 ? call.timeout : group->timeout();
  }

  const std::shared_ptr<Group> group;  // over all hosts
  const Hosts hosts;
  const std::shared_ptr<Group> host_group;
  const std::shared_ptr<GpuCommunicator> local;
  const int device;
  const int generation = forkGeneration();  // forks before it was made
  const bool hierarchical;
  const int rail;

  std::shared_ptr<Segment> segment;
  MemoryPtr signals;   // a Signals in it
  MemoryPtr counters;  // a Local
  std::unique_ptr<NcclRing> ring;

  std::mutex calls;  // one at a time puts work into streams
  EventPool events;
  std::shared_ptr<Event> last;
  unsigned long long last_stream = 0;  // its number
  std::unique_ptr<Watchdog> watchdog;  // last: its threads use the rest
};

}  // namespace ringreduce::cuda
