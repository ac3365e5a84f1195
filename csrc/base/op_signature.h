// The signature of an operation: the part of it that ranks must agree on, and the same as text.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

#include "base/clock.h"
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
  enum class Parts : uint8_t { kUneven, kTensors, kShape, kCountsOfEachRank, kCoding };

  const char* name;
  const char* root = "from";  // "from rank 2" or "to rank 2"
  Parts parts = Parts::kUneven;
  bool has_elements = true;
};

// In the order of Kind.
inline constexpr std::array kKindTable{
    KindInfo{.name = "all_reduce", .parts = KindInfo::Parts::kTensors},
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

// How a compressed all-reduce codes values.  Ranks compare these numbers, so they never change
// meaning.
enum class Codec : uint8_t { kBfloat16, kFloat16, kInt8, kInt4 };

struct CodecInfo {
  const char* name;
  size_t bits;             // an element
  size_t scale_bytes = 0;  // of each block; 0: an element is coded by itself
};

// In the order of Codec.
inline constexpr std::array kCodecTable{
    CodecInfo{"bfloat16", 16},
    CodecInfo{"float16", 16},
    CodecInfo{"int8", 8, 2},
    CodecInfo{"int4", 4, 2},
};
inline constexpr int kCodecs = static_cast<int>(kCodecTable.size());

constexpr const CodecInfo& infoOf(Codec codec) {
  return kCodecTable[static_cast<size_t>(codec)];
}

constexpr std::optional<Codec> codecNamed(std::string_view name) {
  for (uint8_t i = 0; i < kCodecs; ++i)
    if (name == kCodecTable[i].name) return static_cast<Codec>(i);
  return std::nullopt;
}
constexpr const char* name(Codec codec) {
  return infoOf(codec).name;
}
// "bfloat16, float16, int8 and int4"
std::string codecNames();

struct Coding {
  Codec codec = Codec::kBfloat16;
  bool stochastic = false;
  uint64_t seed = 0;
};

// Which ranks decode, add and code again (collectives/compressed_all_reduce.cc).
enum class CodedSchedule : uint8_t { kAuto, kOwner, kRing };
inline constexpr std::array kCodedScheduleNames{"auto", "owner", "ring"};

constexpr std::optional<CodedSchedule> codedScheduleNamed(std::string_view name) {
  for (uint8_t i = 0; i < kCodedScheduleNames.size(); ++i)
    if (name == kCodedScheduleNames[i]) return static_cast<CodedSchedule>(i);
  return std::nullopt;
}
// "auto, owner and ring"
std::string codedScheduleNames();

// Of a message that several tensors have been put into: a hash of their sizes.  0 for one tensor.
uint64_t bordersOf(const std::vector<size_t>& sizes);

// For `parts` of the signature of a compressed all-reduce: codec and schedule, a byte each, whether
// it is stochastic, and half a hash of the seed, if it is, and of the message's borders.
uint64_t codingBits(const Coding& coding, CodedSchedule schedule, uint64_t borders = 0);

inline constexpr uint8_t kNoReduceOp = 0xff;
inline constexpr int32_t kNoRoot = -1;

// What ranks compare with each other before an operation.  It is sent as it lies in memory, so it
// has no padding.
struct OpSignature {
  uint64_t sequence = 0;  // operations of this group before this one
  uint64_t count = 0;     // elements
  uint64_t history = 0;   // a hash of all operations before it
  Kind kind = Kind::kBarrier;
  DType dtype = DType::kUInt8;
  uint8_t op = kNoReduceOp;
  uint8_t reserved = 0;
  int32_t root = kNoRoot;
  // Depends on the kind: 0, a hash of the parts' sizes or of a shape, bordersOf or codingBits.
  uint64_t parts = 0;

  // The elements of all parts together, and a hash of their sizes if these differ.
  void setParts(const std::vector<size_t>& counts);

  // `history` of the operation after this one.
  //
  // A rank that does not wait for another in an operation (the root of a broadcast) does not see
  // the other's call.  So each signature has this hash of all before it, and a difference shows at
  // the next operation at the latest.
  uint64_t historyAfter() const;

  // All but `reserved`, for code that goes through them.
  template <class Self>
  static constexpr auto fields(Self& a) {
    return std::tie(a.sequence, a.count, a.history, a.kind, a.dtype, a.op, a.root, a.parts);
  }

  bool operator==(const OpSignature&) const = default;
};
static_assert(std::has_unique_object_representations_v<OpSignature>);
inline constexpr uint64_t kNoOperation = ~uint64_t{0};  // as a sequence: nothing was announced

// What a rank waited elsewhere before it came.  It is sent as it lies in memory.
struct Inherited {
  // Between hosts a rank may not know whom it waited for.
  static constexpr int32_t kNone = -1, kUnknown = -2;

  int32_t rank = kNone;   // where the delay began, by its number in errors
  uint32_t micros = 0;    // how long this rank waited for it
  uint32_t sequence = 0;  // the operation in which it waited longest, by its number in errors

  Nanos nanos() const { return rank == kNone ? 0 : micros * kMicrosecond; }
  bool operator==(const Inherited&) const = default;
};

// What a rank tells the others of an operation before it runs it.  Two of them are equal if their
// signatures are.
struct Announcement : OpSignature {
  // When this rank began it, by the group's clock (base/clock.h); 0: not known.
  Nanos arrived = 0;
  uint32_t clock_error = 0;  // the bound of its error in nanoseconds
  Inherited why = {};        // this rank did not come sooner
};
static_assert(sizeof(Announcement) == 64 && std::has_unique_object_representations_v<Announcement>);

// The progress of a rank's operations in GPU streams, which its group does not run itself.
struct StreamProgress {
  uint64_t announced = 0;                        // operations announced
  OpSignature oldest{.sequence = kNoOperation};  // the first that has not finished, if there is one
  bool begun = false;                            // its stream has reached it

  bool operator==(const StreamProgress&) const = default;
};

// Whether a rank of a group of `size` can have announced this.  A signature that was received is
// checked before it is used, because texts name its kind, dtype and ranks.
constexpr bool isSound(const OpSignature& a, int size) {
  return static_cast<size_t>(a.kind) < kKindTable.size() &&
         static_cast<size_t>(a.dtype) < kDTypes.size() && a.reserved == 0 &&
         (a.op < kReduceOps || a.op == kNoReduceOp) &&
         (a.root == kNoRoot || (a.root >= 0 && a.root < size));
}

// "all_reduce #17 (float32, 1024 elements, SUM)"
std::string describe(const OpSignature& operation);

}  // namespace ringreduce
