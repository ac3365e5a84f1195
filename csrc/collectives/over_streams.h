// The streams that a collective runs over between hosts, and how it is to run over them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "algorithm/agreed_line.h"
#include "algorithm/choose.h"
#include "algorithm/cut.h"
#include "base/bytes.h"
#include "base/clock.h"
#include "base/op_signature.h"
#include "transport/transport.h"
#include "transport/wait_guard.h"

namespace ringreduce {

// The inputs of the choice of algorithms, and the order of addition.
struct StreamOptions {
  Algorithm algorithm = Algorithm::kAuto;
  WireCost cost = {};     // as it was known when the group was made
  bool measures = false;  // the rate of lines is not known: algorithms follow what calls tell
  AddOrder order = AddOrder::kRing;
  // The caller's ranks, first to last, as the transport numbers them; empty: it does as the caller.
  std::vector<int> callers_ranks = {};
};

// Memory for one operation.  Blocks are kept for the next one, so that small calls allocate
// nothing; large blocks are freed.
class Scratch {
 public:
  // Aligned for any element; not initialised.
  std::byte* take(size_t bytes) {
    while (current_ < blocks_.size()) {
      Block& block = blocks_[current_];
      if (bytes <= block.bytes - block.taken) {
        std::byte* memory = block.memory.get() + block.taken;
        block.taken += roundUp(bytes, kAlignment);
        return memory;
      }
      ++current_;
    }
    const size_t size = roundUp(bytes < kSmallest ? kSmallest : bytes, kAlignment);
    blocks_.push_back({std::make_unique_for_overwrite<std::byte[]>(size), size, 0});
    return take(bytes);
  }

  // Makes all memory available again.
  void reset() {
    std::erase_if(blocks_, [](const Block& block) { return block.bytes > kLargestKept; });
    for (Block& block : blocks_) block.taken = 0;
    current_ = 0;
  }

 private:
  static constexpr size_t kAlignment = 64;
  static constexpr size_t kSmallest = 64 << 10, kLargestKept = 4 << 20;

  struct Block {
    std::unique_ptr<std::byte[]> memory;
    size_t bytes, taken;
  };
  std::vector<Block> blocks_;
  size_t current_ = 0;  // the first that may have room
};

// The counterpart of OverMemory (shared_memory.h).  Helpers that only move bytes take its
// Transport.
class OverStreams {
 public:
  // Both must outlive it.  `guard` is the transport's.
  OverStreams(Transport& over, WaitGuard& guard, StreamOptions how)
      : rank(over.rank()),
        size(over.size()),
        transport(over),
        watch(guard),
        options(std::move(how)),
        line(over.size(), options.cost) {}

  const int rank, size;
  Transport& transport;
  WaitGuard& watch;
  const StreamOptions options;
  AgreedLine line;
  Way way;  // of the last operation

  // What is known of the wire now.
  WireCost cost() const {
    WireCost known = options.cost;
    if (const uint64_t rate = line.rate(); rate > 0) known.measured = 1 / static_cast<double>(rate);
    return known;
  }
  // `all_hear`: each rank takes data from all from which its algorithm takes any (agreed_line.h).
  Algorithm choose(const CallSize& call, bool all_hear = false) {
    const GroupShape shape{.ranks = size, .order = options.order};
    const Candidate taken = ringreduce::choose(call, shape, cost()).taken;
    taken_ = all_hear ? taken : Candidate{};
    measure(taken.hops, taken.bytes);
    return taken.algorithm;
  }
  // The operation takes so many hops, one after the other, and moves so many bytes, about.
  void measure(double hops, double bytes) {
    hops_ = hops;
    if (bytes >= AgreedLine::kLeastBytes) transport.measure();
  }
  // For ranks of which so many share each host.
  bool takesHierarchy(const CallSize& call, int ranks_on_host) const {
    const GroupShape shape{.ranks = size, .ranks_on_host = ranks_on_host, .order = options.order};
    return ringreduce::choose(call, shape, cost()).taken.algorithm == Algorithm::kHierarchical;
  }
  // Starts an operation; transport.finish() ends it.
  void begin(const Announcement& operation) {
    scratch_.reset();
    taken_ = {};
    hops_ = 0;
    transport.begin({operation, line.says()});
  }
  // After the end of an operation: notes what the line carries for this rank, by which streams are
  // paced.  Returns bytes a second.
  uint64_t notice() {
    const Transport::Heard& heard = transport.heard();
    const uint64_t bytes = transport.heardBytes();
    const uint64_t rate = arrivalRate(bytes, now() - heard.since, hops_, options.cost);
    // Calls of paced streams measure the pace at most, so it must not follow later rates down.
    greatest_ = std::max(greatest_, rate);
    came_ += bytes;
    if (came_ > kBelieved && greatest_ > 0) transport.setLineRate(greatest_);
    return rate;
  }
  // The same after one that went over the streams only.  Returns whether the line's rate is new, by
  // which algorithms are chosen.
  bool learn() {
    const uint64_t rate = notice();
    if (!options.measures || !line.end(taken_, rate, transport.heard().rate)) return false;
    // In a ring through hosts of several ranks one sends to the next host and another receives.
    if (greatest_ == 0) transport.setLineRate(line.rate());
    return true;
  }
  // Memory until finish(), to send from or to receive into.
  std::byte* scratch(size_t bytes) { return scratch_.take(bytes); }
  // The rank whose value is the k-th to be added in chunk c.
  int kthToAdd(int c, int k) const {
    const int r = ringreduce::kthToAdd(c, k, size, options.order);
    if (options.order == AddOrder::kRing || options.callers_ranks.empty()) return r;
    return options.callers_ranks[static_cast<size_t>(r)];
  }

 private:
  // While fewer bytes have come, windows have not opened yet, or a rank has paused.
  static constexpr uint64_t kBelieved = 8 << 20;

  Scratch scratch_;
  Candidate taken_;                   // by the operation
  double hops_ = 0;                   // of it
  uint64_t greatest_ = 0, came_ = 0;  // the rate of a call, and bytes of all that were measured
};

}  // namespace ringreduce
