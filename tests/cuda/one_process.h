// All ranks of a group in one process and on one GPU: a communicator and a stream each, run by one
// thread.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../cpp/ranks.h"
#include "cuda/communicator/host_communicator.h"
#include "cuda/kernels/kernel_table.h"
#include "cuda/memory/own_memory.h"
#include "gpu.h"

namespace one_process {

using namespace ringreduce;
using cuda::Choice;
using cuda::CommunicatorOptions;
using cuda::GpuAllReduce;
using cuda::HostCommunicator;

// Memory that peers can map, on the current GPU.
inline gpu::Buffer ownBuffer(size_t bytes) {
  int device = 0;
  gpu::must(cudaGetDevice(&device), "ask for the GPU");
  return {cuda::ownMemory(device, bytes, [] { return std::vector<CUstream_st*>(); }), bytes};
}

// One all-reduce of all ranks.
struct Run {
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  size_t count = 0;
  std::vector<const void*> inputs;  // by rank
  std::vector<void*> outputs;
  double factor = 1;
  const void* factor_on_device = nullptr;
};

class Ranks {
 public:
  // `options.together` lets kernels of all ranks run at once.
  Ranks(int size, const CommunicatorOptions& options, const GroupOptions& of_group)
      : comms_(static_cast<size_t>(size)), streams_(static_cast<size_t>(size)) {
    ranks::MemoryStore store;
    ranks::inThreads(size, [&](int r) {
      comms_[static_cast<size_t>(r)] =
          HostCommunicator::create(Group::create(store, r, size, of_group), 0, options);
    });
  }

  int size() const { return static_cast<int>(comms_.size()); }
  HostCommunicator& comm(int r) const { return *comms_[static_cast<size_t>(r)]; }
  cudaStream_t stream(int r = 0) const { return streams_[static_cast<size_t>(r)].get(); }

  // Waits until all ranks use these buffers, by rank, where they are; "" or why they do not.
  std::string map(const std::vector<void*>& buffers, size_t bytes) const {
    const Nanos deadline = deadlineIn(gpu::kHang);
    for (int r = 0; r < size(); ++r)
      while (!comm(r).isMapped(buffers[static_cast<size_t>(r)], bytes)) {
        if (now() > deadline) return "rank " + std::to_string(r) + "'s memory is not mapped";
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    return "";
  }

  GpuAllReduce callOf(const Run& run, int r, Choice choice) const {
    const auto i = static_cast<size_t>(r);
    return {.input = run.inputs[i],
            .output = run.outputs[i],
            .count = run.count,
            .dtype = run.dtype,
            .op = run.op,
            .factor = run.factor,
            .factor_on_device = run.factor_on_device,
            .algorithm = choice};
  }

  // One cooperative grid, in the first rank's stream.
  void together(const Run& run, Choice choice) const {
    std::vector<GpuAllReduce> calls;
    std::vector<HostCommunicator*> all;
    for (int r = 0; r < size(); ++r) {
      calls.push_back(callOf(run, r, choice));
      all.push_back(&comm(r));
    }
    HostCommunicator::allReduceTogether(all, calls, stream());
  }

  // Each rank in its own stream, or in that of the same rank of `other`.
  void apart(const Run& run, Choice choice, const Ranks* other = nullptr) const {
    const Ranks& streams = other ? *other : *this;
    const auto put = [&](int r) { comm(r).allReduce(callOf(run, r, choice), streams.stream(r)); };
    // A long message goes through staging memory in many pieces.  One rank's steps may then fill
    // its stream's queue, and the thread that puts them there waits until others' let them go on.
    if (choice == Choice::kDirect && run.count * sizeOf(run.dtype) > kManyPieces)
      ranks::inThreads(size(), put);
    else
      for (int r = 0; r < size(); ++r) put(r);
  }

  // The other streams go on from where the first one is, and the first one after them.
  void fork() const {
    mark_.record(stream());
    for (int r = 1; r < size(); ++r) mark_.holdBack(stream(r));
  }
  void join() const {
    for (int r = 1; r < size(); ++r) {
      mark_.record(stream(r));
      mark_.holdBack(stream());
    }
  }

  // Throws the group's error, or if it takes too long.
  void wait() const {
    for (const auto& comm : comms_)
      if (!comm->wait(gpu::kHang))
        throw std::runtime_error("rank " + std::to_string(comm->rank()) +
                                 ": an all-reduce does not come to an end");
    for (int r = 0; r < size(); ++r) gpu::finish(stream(r), "an all-reduce");
  }

  // "" if the blocks of all ranks can be on the GPU at once, as one cooperative grid needs it.
  std::string whyNotTogether(DType dtype) const {
    const cuda::Device& facts = comm(0).device();
    if (facts.ends_long_kernels) return "this GPU ends long kernels (a display, or WSL)";
    if (!facts.cooperative_launch) return "this GPU knows no cooperative grids";
    const int wanted = comm(0).tuning().channels * size();
    for (const void* kernel : cuda::kernelsOf(dtype).all_reduce) {
      if (!kernel) continue;
      int each = 0;
      gpu::must(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, cuda::kThreads, 0),
                "ask how many blocks fit");
      if (each * facts.multiprocessors < wanted)
        return std::to_string(wanted) + " blocks are wanted at once, and " +
               std::to_string(each * facts.multiprocessors) + " fit on this GPU";
    }
    return "";
  }

 private:
  static constexpr size_t kManyPieces = 8 * cuda::kStagingBytes;

  std::vector<std::shared_ptr<HostCommunicator>> comms_;
  std::vector<gpu::Stream> streams_;
  gpu::Mark mark_;
};

// What `put` puts into the ranks' streams, as one graph for each stream.
class Graphs {
 public:
  // Throws std::runtime_error if it cannot be captured.
  Graphs(const Ranks& ranks, const std::function<void()>& put) : ranks_(ranks) {
    std::string error;
    int capturing = 0;
    try {
      for (; capturing < ranks.size(); ++capturing)
        gpu::must(cudaStreamBeginCapture(ranks.stream(capturing), cudaStreamCaptureModeThreadLocal),
                  "begin to capture a stream");
      put();
    } catch (const std::exception& e) {
      error = e.what();
    }
    const auto note = [&](cudaError_t result) {
      if (error.empty() && result != cudaSuccess) error = cudaGetErrorString(result);
    };
    // A thread that captures may not make a graph: all captures end first.
    std::vector<cudaGraph_t> captured;
    for (int r = 0; r < capturing; ++r) {
      captured.push_back(nullptr);
      note(cudaStreamEndCapture(ranks.stream(r), &captured.back()));
    }
    for (int r = 0; r < capturing && error.empty(); ++r) {
      ready_.push_back(nullptr);
      note(cudaGraphInstantiate(&ready_.back(), captured[static_cast<size_t>(r)], 0));
      // Not left to the first launch, while another rank's kernel holds the GPU and waits.
      if (error.empty()) note(cudaGraphUpload(ready_.back(), ranks.stream(r)));
    }
    for (cudaGraph_t graph : captured)
      if (graph) (void)cudaGraphDestroy(graph);
    if (error.empty()) return;
    (void)cudaGetLastError();  // said already
    clear();
    throw std::runtime_error("cannot be captured as a CUDA graph: " + error);
  }
  ~Graphs() { clear(); }
  Graphs(const Graphs&) = delete;
  Graphs& operator=(const Graphs&) = delete;

  void launch() const {
    for (size_t r = 0; r < ready_.size(); ++r)
      gpu::must(cudaGraphLaunch(ready_[r], ranks_.stream(static_cast<int>(r))),
                "launch a CUDA graph");
  }

 private:
  void clear() {
    for (cudaGraphExec_t graph : ready_)
      if (graph) (void)cudaGraphExecDestroy(graph);
    ready_.clear();
  }
  const Ranks& ranks_;
  std::vector<cudaGraphExec_t> ready_;
};

}  // namespace one_process
