// The shared memory that a collective runs over, and how messages go through its slots.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "algorithm/choose.h"
#include "algorithm/cut.h"
#include "base/error.h"
#include "bootstrap/host_memory.h"
#include "transport/shm/exchange.h"
#include "transport/shm/shared_tensors.h"
#include "transport/shm/shm_link.h"
#include "transport/shm/wait.h"

namespace ringreduce {

// Collectives are free functions over an OverMemory and an arguments struct.  They run in one
// thread at a time.  They throw the error of a wait; user memory that they wrote is then undefined.
// Arguments were checked before (epoch/operation.cc).
struct OverMemory {
  int rank, size;
  Exchange& exchange;
  SendLink& next;  // to rank + 1
  RecvLink& prev;  // from rank - 1
  Slots link_slots;
  WaitGuard& watch;
  Algorithm algorithm;
  AddOrder order = AddOrder::kRing;
  SharedTensors* tensors = nullptr;  // null: tensors are not used in place
  Way way = {};                      // of the last operation

  Algorithm choose(const CallSize& call) const {
    return ringreduce::choose(call, {.ranks = size, .in_memory = true}, {}).taken.algorithm;
  }
  int previousRank() const { return (rank + size - 1) % size; }
};

// Calls of one thread at a time.  The host memory must live as long.
class SharedMemory {
 public:
  SharedMemory(int rank, const HostMemory& host_memory, WaitGuard& watch);
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  OverMemory& over() { return over_; }
  // Null: tensors are not used in place.
  SharedTensors* tensors() const { return over_.tensors; }
  void setPatience(Patience patience) { waiter_.setPatience(patience); }
  size_t bytes() const { return bytes_; }

 private:
  const int size_;
  const size_t bytes_;
  Waiter waiter_;
  Exchange exchange_;
  ShmSendLink to_next_;
  ShmRecvLink from_prev_;
  std::unique_ptr<SharedTensors> tensors_;
  OverMemory over_;
};

// Fills a few slices first, then alternates one `fill` and one `rest`: a slice is in its slot well
// before peers look for it.  A rank fills at most this many slices more than it is done with.  That
// leaves room for slices that slower ranks still read, and in two-shot for the one to be collected.
template <class Fill, class Rest>
void pipeline(const Exchange& exchange, uint64_t slices, Fill fill, Rest rest) {
  const auto ahead = static_cast<uint64_t>(std::max(1, exchange.depth() / 2 - 1));
  for (uint64_t j = 0; j < std::min(ahead, slices); ++j) fill(j);
  for (uint64_t j = 0; j < slices; ++j) {
    if (j + ahead < slices) fill(j + ahead);
    rest(j);
  }
}

// A slot shared out between the other ranks: one part for each, all of the same size.
class Parts {
 public:
  // For elements of `width` bytes.  Throws where a slot is too small to hold one for each rank.
  Parts(const OverMemory& c, size_t width) : rank_(c.rank), size_(c.size) {
    const size_t even = c.exchange.slotBytes() / static_cast<size_t>(c.size > 1 ? c.size - 1 : 1);
    bytes_ = even >= kLine ? even / kLine * kLine : even / width * width;
    elements_ = bytes_ / width;
    if (elements_ == 0)
      throw Error(Failure::kArgument, "a slot of " + std::to_string(c.exchange.slotBytes()) +
                                          " bytes is too small for " + std::to_string(c.size) +
                                          " ranks; set RINGREDUCE_SLOT_BYTES higher");
  }

  size_t elements() const { return elements_; }  // that a part holds

  // This rank's slot: the part for rank `to`.
  std::byte* outgoing(std::byte* slot, int to) const { return slot + at(rank_, to); }
  // The slot of rank `from`: the part for this rank.
  const std::byte* incoming(const std::byte* slot, int from) const {
    return slot + at(from, rank_);
  }

 private:
  size_t at(int from, int to) const {
    return static_cast<size_t>((to - from - 1 + size_) % size_) * bytes_;
  }

  const int rank_, size_;
  size_t bytes_, elements_;
};

}  // namespace ringreduce
