// A record of each operation of a group: what it was, when this rank and the others came to it, and
// when it ended.
//
// The recorder is always on.  It keeps the last kRecords in a ring that one thread writes and any
// thread reads without a lock.  All times are CLOCK_MONOTONIC of this host, in nanoseconds.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "algorithm/choose.h"
#include "base/clock.h"
#include "base/dtype.h"
#include "base/op_signature.h"
#include "group/rank_map.h"

namespace ringreduce {

// Python reads it in ringreduce/record.py.
struct OpRecord {
  enum class State : uint8_t { kRuns, kDone, kFailed };
  // A rank that came late, and by how many nanoseconds after the median.
  struct Late {
    int32_t rank = -1;
    float nanos = 0;
  };

  uint64_t index = 0;     // operations of the group before it
  uint64_t sequence = 0;  // its number in errors, "#17"
  uint64_t bytes = 0;     // of this rank's elements
  Nanos posted = 0;       // the call
  Nanos arrived = 0;      // it began to run: ranks wait for this one until then; 0: it did not
  Nanos first_data = 0;   // the first data of another rank were there; 0: none
  Nanos done = 0;         // it ended; 0: it runs
  Nanos first = 0;        // the first rank of those known came
  Nanos median = 0;       // half of them had come
  Nanos clock_error = 0;  // times of ranks of other hosts are off by this at most
  std::array<Late, 3> latest{};
  uint32_t step = 0, bucket = 0;  // of training; the number of this all-reduce in its step
  uint32_t known = 0;             // ranks whose arrival is known, this one included
  int32_t root = kNoRoot;
  Kind kind = Kind::kBarrier;
  DType dtype = DType::kUInt8;
  uint8_t op = kNoReduceOp;
  Algorithm algorithm = kNoAlgorithm;  // of an all-reduce
  bool in_place = false;               // in tensors that the ranks share
  uint8_t codec = kNoCodec;
  State state = State::kRuns;
  uint8_t reserved = 0;

  static constexpr uint8_t kNoCodec = 0xff;
};
static_assert(sizeof(OpRecord) == 128 && std::is_trivially_copyable_v<OpRecord>);

// Sums over the operations of a group, for metrics.
struct Totals {
  struct OfKind {
    uint64_t operations = 0, bytes = 0;
    Nanos nanos = 0;  // from when they began to run until they ended
  };
  std::array<OfKind, std::size(kKindTable)> kinds{};  // without those that failed
  uint64_t failed = 0;
  std::vector<Nanos> waited;  // by rank: how long this rank waited for it as the last one
};

// Training steps of this process, which a hook of torch's optimizers counts.
inline std::atomic<uint32_t> training_step{0};

class Recorder {
 public:
  static constexpr size_t kRecords = 4096;

  explicit Recorder(int ranks);
  // Replaces a record with the same index.  By one thread at a time.
  void put(const OpRecord& record);
  // Returns the records from `index` on, oldest first; overwritten ones are missing.  If no record
  // had the index before it, returns all: so a reader of a backend goes on after the backend's
  // group was replaced.  From any thread.
  std::vector<OpRecord> since(uint64_t index) const;

  // Adds an operation that has ended to the sums.  By one thread at a time.
  void count(const OpRecord& record);
  // From any thread.  An operation that ends meanwhile may be in some of the sums only.
  Totals totals() const;

  // Sets when ranks came: `first`, `median`, `latest` and `known`, and `first_data` if it is 0.
  // `arrived`: by position; 0: not known.
  void setArrivals(OpRecord& record, const std::vector<Nanos>& arrived, const RankMap& ranks);

 private:
  using Words = std::array<uint64_t, sizeof(OpRecord) / sizeof(uint64_t)>;
  // `version` is odd while the words change.
  struct Slot {
    std::atomic<uint64_t> version;
    std::array<std::atomic<uint64_t>, std::tuple_size_v<Words>> words;
  };
  struct Sums {
    std::atomic<uint64_t> operations, bytes, nanos;
  };
  struct Frees {
    void operator()(Slot* slots) const;
  };

  const std::unique_ptr<Slot[], Frees> slots_;
  std::atomic<uint64_t> next_{0};
  std::vector<std::pair<Nanos, int>> known_;  // arrivals and ranks
  std::array<Sums, std::size(kKindTable)> kinds_{};
  std::atomic<uint64_t> failed_{0};
  std::vector<std::atomic<uint64_t>> waited_;
};

// The record of an operation while it runs.
struct Recording {
  Recorder& recorder;
  OpRecord record;

  void describe(const OpSignature& signature, const RankMap& ranks);
  void begin(Nanos arrived);
  void end(OpRecord::State state);
};

}  // namespace ringreduce
