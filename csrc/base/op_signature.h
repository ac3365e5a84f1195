// The signature of an operation: the part of it that ranks must agree on, and the same as text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>

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
// How a compressed all-reduce codes values.  Ranks compare these numbers, so they never change
// meaning.
enum class Codec : uint8_t { kBfloat16, kFloat16, kInt8, kInt4 };
inline constexpr const char* kCodecNames[] = {"bfloat16", "float16", "int8", "int4"};
inline constexpr int kCodecs = static_cast<int>(std::size(kCodecNames));

constexpr std::optional<Codec> codecNamed(std::string_view name) {
  for (uint8_t i = 0; i < kCodecs; ++i)
    if (name == kCodecNames[i]) return static_cast<Codec>(i);
  return std::nullopt;
}
constexpr const char* name(Codec codec) {
  return kCodecNames[static_cast<int>(codec)];
}

struct Coding {
  Codec codec = Codec::kBfloat16;
  bool stochastic = false;
  uint64_t seed = 0;
};

// Which ranks decode, add and code again (collectives/coded.h).
enum class CodedSchedule : uint8_t { kAuto, kOwner, kRing };
inline constexpr const char* kCodedScheduleNames[] = {"auto", "owner", "ring"};

constexpr std::optional<CodedSchedule> codedScheduleNamed(std::string_view name) {
  for (uint8_t i = 0; i < std::size(kCodedScheduleNames); ++i)
    if (name == kCodedScheduleNames[i]) return static_cast<CodedSchedule>(i);
  return std::nullopt;
}

// For `parts` of the signature of a compressed all-reduce: codec and schedule, a byte each, whether
// it is stochastic, and the low half of the seed's hash.
uint64_t codingBits(const Coding& coding, CodedSchedule schedule);

inline constexpr uint8_t kNoReduceOp = 0xff;
inline constexpr int32_t kNoRoot = -1;

struct OpSignature {
  uint64_t sequence = 0;  // operations of this group before this one
  uint64_t count = 0;     // elements
  uint64_t history = 0;   // a hash of all operations before it
  Kind kind = Kind::kBarrier;
  DType dtype = DType::kUInt8;
  uint8_t op = kNoReduceOp;
  int32_t root = kNoRoot;
  // A hash of the parts' sizes, where they are unequal; the codingBits of a compressed all-reduce.
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

// Whether a rank of a group of `size` can have announced this.  Checks signatures from other ranks,
// since texts index tables by their fields.
constexpr bool isSound(const OpSignature& a, int size) {
  return static_cast<size_t>(a.kind) < kKindCount &&
         static_cast<size_t>(a.dtype) < kDTypes.size() &&
         (a.op < kReduceOps || a.op == kNoReduceOp) &&
         (a.root == kNoRoot || (a.root >= 0 && a.root < size));
}

// "all_reduce #17 (float32, 1024 elements, SUM)"
std::string describe(const OpSignature& operation);

}  // namespace ringreduce
