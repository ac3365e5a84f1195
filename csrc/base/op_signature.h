// What an operation is, as far as ranks must agree on it, and the same in words.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>

#include "base/dtype.h"

namespace ringreduce {

enum class Kind : uint8_t {
  kAllReduce,
  kReduce,
  kReduceScatter,
  kBroadcast,
  kAllGather,
  kGather,
  kScatter,
  kAllToAll,
  kBarrier,
  kSparseAllReduce,
  kMonitoredBarrier,
  kCompressedAllReduce,
};
inline constexpr const char* kKindNames[] = {"all_reduce",        "reduce",
                                             "reduce_scatter",    "broadcast",
                                             "all_gather",        "gather",
                                             "scatter",           "all_to_all",
                                             "barrier",           "sparse all_reduce",
                                             "monitored_barrier", "compressed all_reduce"};
inline constexpr size_t kKindCount = std::size(kKindNames);
inline constexpr uint8_t kNoReduceOp = 0xff;
inline constexpr int32_t kNoRoot = -1;

// What an operation is, as far as ranks must agree on it.
struct OpSignature {
  uint64_t sequence = 0;  // operations of this group before this one
  uint64_t count = 0;     // elements
  uint64_t history = 0;   // a hash of all operations before it
  Kind kind = Kind::kBarrier;
  DType dtype = DType::kUInt8;
  uint8_t op = kNoReduceOp;
  int32_t root = kNoRoot;
  // Where it has parts of unequal sizes: a hash of these.  Of a compressed all-reduce: how it is
  // coded (base/coding.h).
  uint64_t parts = 0;

  bool operator==(const OpSignature&) const = default;
};
inline constexpr uint64_t kNoOperation = ~uint64_t{0};  // as a sequence: nothing was announced

// The progress of a rank's operations in GPU streams, which its group does not run itself.
struct StreamProgress {
  uint64_t announced = 0;                        // operations announced
  OpSignature oldest{.sequence = kNoOperation};  // the first that has not finished, if there is one
  bool begun = false;                            // its stream has reached it

  bool operator==(const StreamProgress&) const = default;
};

// Whether a rank of a group of `size` can have announced this: what comes from elsewhere is looked
// at before it is believed, since texts name what stands there.
constexpr bool isSound(const OpSignature& a, int size) {
  return static_cast<size_t>(a.kind) < kKindCount &&
         static_cast<size_t>(a.dtype) < kDTypes.size() &&
         (a.op < kReduceOps || a.op == kNoReduceOp) &&
         (a.root == kNoRoot || (a.root >= 0 && a.root < size));
}

// "all_reduce #17 (float32, 1024 elements, SUM)"
std::string describe(const OpSignature& operation);

}  // namespace ringreduce
