// The work of one thread block in a kernel, by algorithm.  The kernels (kernels.cuh) and the tests
// on the host run it.
#pragma once

#include "cuda/kernels/ll.h"
#include "cuda/kernels/located.h"
#include "cuda/kernels/push_all_reduce.h"
#include "cuda/kernels/push_gather.h"
#include "cuda/kernels/ring_kernel.h"

namespace ringreduce::cuda {

// The algorithms of kernels that wait for their peers; gpu_tuning.h chooses.
enum class DeviceAlgorithm : uint8_t { kOneShot, kTwoShot, kRing };
inline constexpr int kDeviceAlgorithms = 3;
inline constexpr const char* kDeviceAlgorithmNames[] = {"oneshot", "twoshot", "ring"};

// A kernel's first step: reads the factor, if it lies in device memory.
template <class E>
RINGREDUCE_DEVICE void readFactor(RankCall& call) {
  if constexpr (E::kFloating)
    if (call.factor) call.arithmetic.factor = *static_cast<const typename E::Value*>(call.factor);
}

// P: the number of ranks, if it is known when the kernel is compiled; else 0.
template <DeviceAlgorithm algorithm, class E, class Rules, int P = 0, class Block>
RINGREDUCE_DEVICE void allReduceBlock(Block& block, const DeviceComm& comm, const RankCall& call,
                                      int channel, int channels) {
  Guard<Block> guard(block, comm, call, channel);
  if constexpr (algorithm == DeviceAlgorithm::kOneShot) {
    oneShot<E, Rules, P>(block, guard, comm, call, channel, channels);
  } else if constexpr (algorithm == DeviceAlgorithm::kTwoShot) {
    TwoShot<E, Rules, Block, P>(block, guard, comm, call, channel, channels).run();
  } else {
    ring<E, Rules>(block, guard, call, channel, channels);
  }
  guard.leave(channels, call.output, call.count * sizeof(typename E::Stored));
}

// All-reduce by LL.
template <class E, class Rules, int P, class Block>
RINGREDUCE_DEVICE void llBlock(Block& block, const DeviceComm& comm, const RankCall& call,
                               int channel, int channels) {
  Guard<Block> guard(block, comm, call, channel);
  OneShotLL<E, Rules, Block, P>(block, guard, comm, call, channel).run();
  guard.leave(channels, call.output, call.count * sizeof(typename E::Stored));
}

// All-reduce and reduce-scatter of tensors where they are; `peers` is in the block's shared memory.
template <class E, class Rules, int P, class Block>
RINGREDUCE_DEVICE void locatedBlock(Block& block, const DeviceComm& comm, const RankCall& call,
                                    const Location& location, PeerTensors& peers, int channel,
                                    int channels) {
  Guard<Block> guard(block, comm, call, channel);
  LocatedAllReduce<E, Rules, Block, P>(block, guard, comm, call, location, peers, channel, channels)
      .run();
  guard.leave(channels, call.output, call.count * sizeof(typename E::Stored));
}

// All-gather to tensors where they are, of elements of `unit` bytes.
template <size_t unit, class Rules, class Block>
RINGREDUCE_DEVICE void locatedGatherBlock(Block& block, const DeviceComm& comm,
                                          const RankCall& call, const Location& location,
                                          PeerTensors& peers, int channel, int channels) {
  Guard<Block> guard(block, comm, call, channel);
  LocatedAllGather<Raw<unit>, Rules, Block>(block, guard, comm, call, location, peers, channel,
                                            channels)
      .run();
  guard.leave(channels, call.output, static_cast<size_t>(comm.size) * call.count * unit);
}

// All-gather and broadcast of elements of `unit` bytes.
template <size_t unit, class Rules, class Block>
RINGREDUCE_DEVICE void gatherBlock(Block& block, const RankCall& call, int channel, int channels) {
  Guard<Block> guard(block, *call.comm, call, channel);
  if (call.scatter)
    TwoHopBroadcast<Raw<unit>, Rules, Block>(block, guard, call, channel, channels).run();
  else
    Gather<Raw<unit>, Rules, Block>(block, guard, call, channel, channels).run();
  // A root's own elements were never written, and stay.
  const DeviceComm& comm = *call.comm;
  const int parts = call.root == kEverybody ? comm.size : call.root != comm.rank;
  guard.leave(channels, call.output, static_cast<size_t>(parts) * call.count * unit);
}

}  // namespace ringreduce::cuda
