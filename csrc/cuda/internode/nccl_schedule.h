// The ring between hosts: algorithm/ring.h's schedule, put into two streams of a GPU.
//
// One stream, the wire, has the exchanges: each sends a slice to the next rank and receives one
// from the previous rank, as one group of NCCL calls.  The other, the caller's, has kernels that
// add received sums and this rank's inputs (stream_kernels.h).  Exchange t sends the sums of the
// slice that exchange t - W received, W being the window, so while W - 1 exchanges are on the wire
// there is time to add.  All ranks have the same exchanges, and number t of one meets number t of
// the next: no rank can wait in a circle.
//
// Complete sums are received in the user's output and sent on from there, and inputs are sent from
// the user's input: only additions copy.  Inputs travel as they are stored.  Partial sums of halves
// travel as float32, so that they are rounded once (with two ranks there are none).  Slots hold
// data that is in neither input nor output: one for each exchange whose slice is still needed, W +
// 1 in all, used in turn.
//
// The schedule is a list of steps to be put into the streams in this order; a test's threads run
// the same list.  Events order the streams, as in CUDA: a step that waits for an event waits for
// the latest step before it in the list that records it.
//
// Model.  o is the cost of an exchange besides its bytes (a launch, a network's latency), B the
// bytes a second of a link, S the message; P ranks and n slices a chunk cost
//
//     2 (P - 1) (n o + S / (P B))     and half as much again in the first half for halves
//
// so slices are as long as the memory for slots allows: 4 MiB are 80 us at 50 GB/s, beside some 15
// us for o.  Nothing of it is measured.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "algorithm/cut.h"
#include "base/dtype.h"

namespace ringreduce::cuda {

inline constexpr size_t kRingWindow = 2;
inline constexpr size_t kRingSlots = kRingWindow + 1;
inline constexpr size_t kRingBytes = size_t{4} << 20;    // the most that is exchanged at once
inline constexpr size_t kRingLeast = size_t{128} << 10;  // from twice this on a chunk is cut up
// A slot has place for addends as they are stored beside their sum as float32.
inline constexpr size_t kRingSlotBytes = kRingBytes + kRingBytes / 2;

// Events: of exchanges, in turn, and one of the other stream.
inline constexpr int kRingEvents = static_cast<int>(kRingSlots) + 1;
inline constexpr int kOwnEvent = kRingEvents - 1;

struct RingPlace {
  enum class In : uint8_t { kNowhere, kInput, kOutput, kAddends, kSums };
  In in = In::kNowhere;
  size_t slot = 0;  // kAddends: as they are stored; kSums: as they are added
};

struct RingStep {
  enum class Do : uint8_t {
    kBegin,     // the caller's stream has come here
    kStage,     // own addends, scaled, to a slot
    kAdd,       // partial sums and own addends
    kExchange,  // on the wire
    kEnd,       // the caller's stream goes on
  };
  Do what;
  RingPlace from = {}, to = {};     // kAdd: from the partial sums; the own addends are in the input
  Span elements = {}, coming = {};  // of the message; kExchange: sent, received
  bool last = false;                // kAdd: complete now
  int waits = -1, records = -1;     // events
};

constexpr bool isOnWire(const RingStep& step) {
  return step.what == RingStep::Do::kExchange;
}

struct RingPlan {
  int rank, size;  // size >= 2
  size_t count;    // elements
  size_t slice;    // of a chunk, in elements
  bool wide;       // sums that are not complete travel as the dtype's Value
  bool scaled;     // own addends are to be scaled
};

// Whether partial sums of a dtype travel wider than its elements.
constexpr bool travelsWide(DType dtype, int size) {
  return isHalf(dtype) && size > 2;
}

// Elements of a slice: it fits a slot, and the window comes out even.
constexpr size_t ringSlice(size_t count, int size, size_t widest) {
  const size_t chunk = Cut{count, size}.chunkSize();
  if (chunk * widest < 2 * kRingLeast) return chunk;
  const size_t most = kRingBytes / widest / kChunkElements * kChunkElements;
  const size_t slices = roundUp(ceilDiv(chunk, most), kRingWindow);
  return roundUp(ceilDiv(chunk, slices), kChunkElements);
}

std::vector<RingStep> ringSteps(const RingPlan& plan);

}  // namespace ringreduce::cuda
