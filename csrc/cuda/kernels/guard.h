// How a thread block waits without ever hanging, and how it reports that it gave up.
//
// Every wait polls its flag and, less often, the kernel's deadline, the abort flag that the host
// sets (HostRanks::release), and the rank's cause of failure, set by the first of its blocks to
// give up.  After that nothing waits or moves any more: the block runs to its end, and the rank's
// last block sets the flag that a fused optimizer looks at (Local::found_inf) and fills the whole
// output with NaN, or zeros if it is of integers.  A CUDA wait() never blocks, so an optimizer
// would otherwise step with garbage.
//
// Where peers read and write tensors in place (located.h), a block that gives up tells them, and
// then waits until none of them can be at work there, before its output is filled.
//
// The cause holds for all later kernels: each checks it when it starts.
#pragma once

#include "cuda/kernels/kernel_call.h"
#include "cuda/kernels/ordering.h"

namespace ringreduce::cuda {

// Polls of a flag between two checks of the clock and the words, which go to the host's memory.
inline constexpr unsigned kLooksPerCheck = 256;

// How long a block that has given up waits for peers that may still write to the rank's tensors.
// A peer that comes later finds that the rank has left, and writes nothing.
inline constexpr int64_t kFarewell = 2'000'000'000;

// The byte that fills the output of a failed call.
//
// Floating-point and complex elements become NaN, which no program takes for a result.  Integers
// and truth values have no such value.  They become 0, since a program may use them as indices
// before it learns of the failure.  An index out of range fails an assertion on the GPU, which ends
// the process's use of it.  -1 is out of range, and so may be what a call left half done.  0 is an
// index of every table that has an element.
constexpr unsigned char poisonOf(DType dtype) {
  switch (dtype) {
    case DType::kInt8:
    case DType::kUInt8:
    case DType::kInt16:
    case DType::kInt32:
    case DType::kInt64:
    case DType::kBool:
    case DType::kUInt16:
    case DType::kUInt32:
    case DType::kUInt64:
      return 0;
    case DType::kFloat8E4M3FNUZ:  // their only NaN
    case DType::kFloat8E5M2FNUZ:
      return 0x80;
    default:  // float4_e2m1fn_x2 alone has no NaN
      return 0xff;
  }
}

// The end of a block's work.  The last of the kernel's `blocks` looks whether the rank has given
// up, or has been told to by the host, and then fills the whole output.
template <class Block>
RINGREDUCE_DEVICE void leaveKernel(Block& block, Local& local, int blocks, AbortFlag* abort,
                                   void* output, size_t bytes, unsigned char poison) {
  block.sync();
  bool last = false;
  if (block.thread() == 0) last = countWord(local.blocks_done) + 1 == static_cast<uint32_t>(blocks);
  if (!block.any(last)) return;
  bool poisoned = peekWord(local.cause) != 0;
  if (block.thread() == 0) {
    local.blocks_done = 0;
    if (abort) poisoned |= abort->isSet(0);
  }
  if (!block.any(poisoned)) return;
  if (block.thread() == 0) block.store(&local.found_inf, 1.0f);
  const auto fill = [&](auto value) {
    auto* at = static_cast<decltype(value)*>(output);
    for (size_t i = static_cast<size_t>(block.thread()); i < bytes / sizeof value;
         i += static_cast<size_t>(block.threads()))
      block.store(at + i, value);
  };
  const size_t odd = reinterpret_cast<uintptr_t>(output) | bytes;
  if (odd % 4 == 0)
    fill(0x01010101u * poison);
  else if (odd % 2 == 0)
    fill(static_cast<uint16_t>(0x0101u * poison));
  else
    fill(poison);
}

template <class Block>
class Guard {
 public:
  RINGREDUCE_DEVICE Guard(Block& block, const DeviceComm& comm, const RankCall& call, int channel)
      : block_(block), comm_(comm), call_(call), channel_(channel), started_(block.nanoseconds()) {
    failed_ = block.any(peekWord(comm.local->cause) != 0);
  }

  // All threads agree on this.
  RINGREDUCE_DEVICE bool failed() const { return failed_; }

  // Returns once ready(i) holds for all i < n, each polled by one thread; false if the block has
  // given up.  A barrier in any case.  peer(i) and step(i) name the rank and the step that are
  // waited for; they are asked only if the block gives up.
  template <class Ready, class Peer, class Step>
  RINGREDUCE_DEVICE bool until(int n, Ready ready, Peer peer, Step step) {
    return until(n, ready, peer, step, [](int) { return Cause::kNone; });
  }
  // The same; once ready(i) holds, why(i) tells a reason to give up, or kNone.
  template <class Ready, class Peer, class Step, class Why>
  RINGREDUCE_DEVICE bool until(int n, Ready ready, Peer peer, Step step, Why why) {
    bool gave_up = false;
    if (!failed_)
      for (int i = block_.thread(); i < n; i += block_.threads()) {
        if (!poll([&] { return ready(i); }, [&] { return peer(i); }, step(i))) {
          gave_up = true;
        } else if (const Cause cause = why(i); cause != Cause::kNone) {
          report(cause, peer(i), step(i));
          gave_up = true;
        }
      }
    failed_ |= block_.any(gave_up);
    return !failed_;
  }

  // After the block has given up: returns once done(i) holds for all i < n, or after kFarewell.
  template <class Done>
  RINGREDUCE_DEVICE void outwait(int n, Done done) {
    const uint64_t begun = block_.nanoseconds();
    for (int i = block_.thread(); i < n; i += block_.threads())
      while (!done(i) && static_cast<int64_t>(block_.nanoseconds() - begun) < kFarewell)
        Block::pause();
  }

  // The end of a block's work; `blocks` share the rank's output of `bytes`.
  RINGREDUCE_DEVICE void leave(int blocks, void* output, size_t bytes) {
    leaveKernel(block_, *comm_.local, blocks, nullptr, output, bytes, call_.poison);
  }

 private:
  template <class Ready, class Peer>
  RINGREDUCE_DEVICE bool poll(Ready ready, Peer peer, uint64_t step) {
    for (unsigned looks = 1;; ++looks) {
      if (ready()) return true;
      if (looks % kLooksPerCheck == 0) {
        const Cause cause = ending();
        if (cause != Cause::kNone) {
          report(cause, peer(), step);
          return false;
        }
      }
      Block::pause();
    }
  }

  RINGREDUCE_DEVICE Cause ending() {
    if (peekWord(comm_.local->cause) != 0) return Cause::kAborted;
    // Signed: the clocks of a GPU's parts may be a little apart.
    const auto passed = static_cast<int64_t>(block_.nanoseconds() - started_);
    if (passed > static_cast<int64_t>(call_.timeout)) return Cause::kTimeout;
    return comm_.abort->isSet(channel_) ? Cause::kAborted : Cause::kNone;
  }

  RINGREDUCE_DEVICE void report(Cause cause, int peer, uint64_t step) {
    if (!claimWord(comm_.local->cause, static_cast<uint32_t>(cause))) return;
    Trouble& trouble = *comm_.trouble;
    trouble.operation = call_.operation;
    trouble.step = step;
    trouble.peer = peer;
    trouble.channel = channel_;
    publishWord(trouble.cause, static_cast<uint64_t>(cause));
  }

  Block& block_;
  const DeviceComm& comm_;
  const RankCall& call_;
  const int channel_;
  const uint64_t started_;
  bool failed_;
};

}  // namespace ringreduce::cuda
