// What an operation is, as far as ranks must agree on it, and the same in words.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/dtype.h"

namespace ringreduce {

// The collectives.  Ranks send each other these values, so they never change meaning.
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

struct KindInfo {
  // What OpSignature::parts of this kind means.
  enum class Parts : uint8_t { kUneven, kShape, kCountsOfEachRank, kCoding };

  const char* name;
  const char* root = "from";  // "from rank 2" or "to rank 2"
  Parts parts = Parts::kUneven;
  bool has_elements = true;
};

// In the order of Kind.
inline constexpr std::array kKindTable{
    KindInfo{"all_reduce"},
    KindInfo{"reduce", "to"},
    KindInfo{"reduce_scatter"},
    KindInfo{"broadcast"},
    KindInfo{"all_gather"},
    KindInfo{"gather", "to"},
    KindInfo{"scatter"},
    KindInfo{.name = "all_to_all", .parts = KindInfo::Parts::kCountsOfEachRank},
    KindInfo{.name = "barrier", .has_elements = false},
    KindInfo{.name = "sparse all_reduce", .parts = KindInfo::Parts::kShape},
    KindInfo{.name = "monitored_barrier", .has_elements = false},
    KindInfo{.name = "compressed all_reduce", .parts = KindInfo::Parts::kCoding},
};
constexpr const KindInfo& infoOf(Kind kind) {
  return kKindTable[static_cast<size_t>(kind)];
}
constexpr const char* name(Kind kind) {
  return infoOf(kind).name;
}

inline constexpr uint8_t kNoReduceOp = 0xff;
inline constexpr int32_t kNoRoot = -1;

// What ranks compare with each other before an operation.
struct OpSignature {
  uint64_t sequence = 0;  // operations of this group before this one
  uint64_t count = 0;     // elements
  uint64_t history = 0;   // a hash of all operations before it
  Kind kind = Kind::kBarrier;
  DType dtype = DType::kUInt8;
  uint8_t op = kNoReduceOp;
  int32_t root = kNoRoot;
  // Depends on the kind: 0, a hash of the parts' sizes or of a shape, or a coding (base/coding.h).
  uint64_t parts = 0;

  // The elements of all parts together, and a hash of their sizes if these differ.
  void setParts(const std::vector<size_t>& counts);

  bool operator==(const OpSignature&) const = default;
};
inline constexpr uint64_t kNoOperation = ~uint64_t{0};  // as a sequence: nothing was announced

// Whether a rank of a group of `size` can have announced this.  A signature that was received is
// checked before it is used, because texts name its kind, dtype and ranks.
constexpr bool isSound(const OpSignature& a, int size) {
  return static_cast<size_t>(a.kind) < kKindTable.size() &&
         static_cast<size_t>(a.dtype) < kDTypes.size() &&
         (a.op < kReduceOps || a.op == kNoReduceOp) &&
         (a.root == kNoRoot || (a.root >= 0 && a.root < size));
}

// "all_reduce #17 (float32, 1024 elements, SUM)"
std::string describe(const OpSignature& operation);

}  // namespace ringreduce
