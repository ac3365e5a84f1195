// GPU thread blocks run by host threads: a thread a lane.  What a kernel does on a GPU
// (csrc/cuda/kernels/collective_kernel.h) runs here under the sanitizers, with delays, with
// mistakes put in, and with its memory accesses counted.
//
// What this can show: that the protocol's flags and barriers order every access (ThreadSanitizer
// sees each, since nothing orders by a fence alone), whatever the timing; that indices, cuts and
// counters are right; that the bits are the CPU's.  What it cannot: that the PTX in
// csrc/cuda/kernels/ordering.h means what its std::atomic_ref counterparts mean, that all blocks of
// a grid are resident at once (host threads always get their turn), and how a GPU's own weak order
// of plain accesses looks where the protocol left a gap that no run here took.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <thread>
#include <type_traits>
#include <vector>

#include "base/clock.h"
#include "cuda/kernels/collective_kernel.h"
#include "cuda/kernels/thread_block.h"
#include "nvlink_switch.h"

namespace host {

using namespace ringreduce;
using namespace ringreduce::cuda;

// Not std::barrier: in GCC's library all of them wait through one table of atomic counters, which
// orders threads that have nothing to do with each other, and so hides races.
class Barrier {
 public:
  explicit Barrier(int threads) {
    pthread_barrier_init(&barrier_, nullptr, static_cast<unsigned>(threads));
  }
  Barrier(const Barrier&) = delete;
  ~Barrier() { pthread_barrier_destroy(&barrier_); }
  void wait() { pthread_barrier_wait(&barrier_); }

 private:
  pthread_barrier_t barrier_;
};

// What the lanes of a block share.
struct Team {
  explicit Team(int lanes) : lanes(lanes), barrier(lanes) {}
  const int lanes;
  Barrier barrier;
  // Three, taken in turn: one that is being voted on, one that may still be read, one to be
  // cleared.
  std::atomic<bool> votes[3]{};
  std::atomic<uint64_t> bytes{0};  // loaded and stored
  PeerTensors peers{};
};

class Block {
 public:
  Block(Team& team, int lane) : team_(team), lane_(lane) {}
  Block(const Block&) = delete;
  ~Block() { team_.bytes += bytes_; }

  int thread() const { return lane_; }
  int threads() const { return team_.lanes; }
  PeerTensors& peers() const { return team_.peers; }  // in the block's shared memory
  void sync() { team_.barrier.wait(); }
  bool any(bool x) {
    std::atomic<bool>& vote = team_.votes[turn_ % 3];
    if (x) vote = true;
    Block::sync();
    const bool result = vote;
    if (lane_ == 0) team_.votes[(turn_ + 2) % 3] = false;
    ++turn_;
    return result;
  }
  template <class T>
  T load(const T* from) {
    bytes_ += sizeof(T);
    return *from;
  }
  template <class T>
  void store(T* to, T value) {
    bytes_ += sizeof(T);
    *to = value;
  }
  template <class T>
  T see(const T& shared) const {
    return shared;
  }
  template <class T>
  void show(T& shared, T value) const {
    shared = value;
  }
  template <DType dtype>
  Pack loadSum(const Pack* from) {
    using nvlink::Windows;
    return nvlink::sumOf<dtype>(Windows::ranksAt(from),
                                [&](int r) { return load(Windows::placeAt(from, r)); });
  }
  void storeAll(Pack* to, Pack value) {
    using nvlink::Windows;
    for (int r = 0; r < Windows::ranksAt(to); ++r) store(Windows::placeAt(to, r), value);
  }
  void fenceAliases() {}  // the host has none
  static uint64_t nanoseconds() { return static_cast<uint64_t>(now()); }
  static void pause() { sched_yield(); }

 private:
  Team& team_;
  const int lane_;
  uint64_t bytes_ = 0, turn_ = 0;
};

// The device memory of P ranks and what their kernels are told of it.
class Ranks {
 public:
  explicit Ranks(const DeviceLayout& layout, uint64_t counters_start = 0)
      : layout_(layout), windows_(layout.ranks), comms_(static_cast<size_t>(layout.ranks)) {
    for (int r = 0; r < layout.ranks; ++r) {
      memory_.push_back(std::make_unique<Line[]>(layout.bytes() / sizeof(Line)));
      locals_.push_back(std::make_unique<Local>());
      // Calls by LL begin short of a refresh.
      for (Counters& c : locals_.back()->counters)
        c = {counters_start, counters_start, counters_start, counters_start,
             counters_start ? kLLRefresh - 3 : 0};
      for (int channel = 0; channel < layout.channels; ++channel) {
        flagAt(r, layout.filledFlag(channel)) = counters_start;
        flagAt(r, layout.emptiedFlag(channel)) = counters_start;
        for (int p = 0; p < layout.ranks; ++p) {
          flagAt(r, layout.pushedFlag(channel, DeviceLayout::Of::kParts, p)) = counters_start;
          flagAt(r, layout.pushedFlag(channel, DeviceLayout::Of::kResults, p)) = counters_start;
        }
      }
    }
    troubles_ = std::make_unique<Trouble[]>(static_cast<size_t>(layout.ranks));
    aborts_ = std::make_unique<AbortFlag[]>(static_cast<size_t>(layout.ranks));
    tables_.resize(static_cast<size_t>(layout.ranks * layout.ranks) * kMostSegments);
    for (int r = 0; r < layout.ranks; ++r) {
      DeviceComm& c = comms_[static_cast<size_t>(r)];
      c.rank = r;
      c.size = layout.ranks;
      c.layout = layout;
      for (int p = 0; p < layout.ranks; ++p) c.base[p] = base(p);
      c.local = locals_[static_cast<size_t>(r)].get();
      c.abort = &aborts_[static_cast<size_t>(r)];
      c.trouble = &troubles_[static_cast<size_t>(r)];
      c.table = tables_.data() + static_cast<size_t>(r * layout.ranks) * kMostSegments;
    }
  }

  const DeviceComm& comm(int r) const { return comms_[static_cast<size_t>(r)]; }
  Trouble& trouble(int r) { return troubles_[static_cast<size_t>(r)]; }
  Window window(int r) const { return windows_.of(r); }
  AbortFlag& abortFlag(int r) { return aborts_[static_cast<size_t>(r)]; }
  // What `at` knows of rank r's segment.
  SegmentEntry& entry(int at, int r, uint64_t segment) {
    return comm(at).table[static_cast<size_t>(r) * kMostSegments + segment % kMostSegments];
  }
  // A tensor of rank r that ends with its segment, which all ranks map.
  Place mapped(int r, std::byte* data, size_t bytes) {
    constexpr size_t kBefore = 64;
    const uint64_t segment = ++segments_[r];
    if (segment >= kMostSegments) throw std::runtime_error("a test has too many segments");
    for (int at = 0; at < layout_.ranks; ++at)
      entry(at, r, segment) = {segment, data - kBefore, kBefore + bytes};
    return {segment, kBefore};
  }
  const DeviceLayout& layout() const { return layout_; }

 private:
  struct alignas(kLine) Line {
    std::byte bytes[kLine];
  };
  std::byte* base(int r) { return memory_[static_cast<size_t>(r)][0].bytes; }
  uint64_t& flagAt(int r, size_t at) { return *reinterpret_cast<uint64_t*>(base(r) + at); }

  const DeviceLayout layout_;
  const nvlink::Windows windows_;
  std::vector<std::unique_ptr<Line[]>> memory_;
  std::vector<std::unique_ptr<Local>> locals_;
  std::vector<DeviceComm> comms_;
  std::unique_ptr<Trouble[]> troubles_;
  std::unique_ptr<AbortFlag[]> aborts_;
  std::vector<SegmentEntry> tables_;
  std::map<int, uint64_t> segments_;
};

struct Shape {
  int ranks, blocks, lanes;
};

// Runs body(block, rank, channel, kernel) for `kernels` kernels of ranks * blocks blocks, and
// returns the bytes that each rank loaded and stored.
//
// As on a GPU, a rank's kernels follow each other, each once the last one has ended; nothing makes
// a rank's kernel wait for another rank's, so that a rank may be in its next call already.
template <class B = Block>
std::vector<uint64_t> run(
    const Shape& shape, size_t kernels,
    const std::type_identity_t<std::function<void(B&, int, int, size_t)>>& body) {
  std::vector<std::unique_ptr<Team>> teams;
  std::vector<std::unique_ptr<Barrier>> streams;
  std::vector<std::thread> threads;
  for (int r = 0; r < shape.ranks; ++r) {
    auto& stream = *streams.emplace_back(std::make_unique<Barrier>(shape.blocks * shape.lanes));
    for (int c = 0; c < shape.blocks; ++c) {
      Team& team = *teams.emplace_back(std::make_unique<Team>(shape.lanes));
      for (int lane = 0; lane < shape.lanes; ++lane)
        threads.emplace_back([&stream, &team, lane, r, c, kernels, &body] {
          B block(team, lane);
          for (size_t kernel = 0; kernel < kernels; ++kernel) {
            body(block, r, c, kernel);
            stream.wait();
          }
        });
    }
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<uint64_t> bytes(static_cast<size_t>(shape.ranks));
  for (size_t i = 0; i < teams.size(); ++i)
    bytes[i / static_cast<size_t>(shape.blocks)] += teams[i]->bytes;
  return bytes;
}

}  // namespace host
