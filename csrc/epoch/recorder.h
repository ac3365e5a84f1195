// A record of each operation and message of a group: what it was, when this rank and the others
// came to it, and when it ended.
//
// The recorder is always on.  It keeps the last kRecords in a ring that one thread writes and any
// thread reads without a lock.  All times are CLOCK_MONOTONIC of this host, in nanoseconds.
//
// It also tells the process's Waits whom this rank waited for, and learns from them what made it
// late.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

#include "algorithm/choose.h"
#include "base/clock.h"
#include "base/dtype.h"
#include "base/op_signature.h"
#include "base/waits.h"
#include "epoch/rank_map.h"
#include "health/arbiter.h"
#include "p2p/messenger.h"

namespace ringreduce {

// Python reads it in ringreduce/observe/record.py.
struct OpRecord {
  enum class State : uint8_t { kRuns, kDone, kFailed, kQueued };
  enum class Message : uint8_t { kNone, kSend, kReceive };
  // A rank that came late, by how many nanoseconds after the median, and why.
  struct Late {
    int32_t rank = -1;
    float nanos = 0;
    Inherited why;
  };

  uint64_t index = 0;  // operations, or messages, of the group before it
  // Its number in errors, "#17"; of a message: of its sender to its receiver.
  uint64_t sequence = 0;
  uint64_t bytes = 0;  // of this rank's elements
  Nanos posted = 0;    // the call
  Nanos arrived = 0;   // it began to run: ranks wait for this one until then; 0: it did not
  uint32_t step = 0, bucket = 0;  // of training; the number of this all-reduce in its step
  uint32_t known = 0;             // ranks whose arrival is known, this one included
  int32_t root = kNoRoot;         // of a message: the peer
  Kind kind = Kind::kBarrier;
  DType dtype = DType::kUInt8;
  uint8_t op = kNoReduceOp;
  Algorithm algorithm = kNoAlgorithm;  // of an all-reduce
  bool in_place = false;               // in tensors that the ranks share
  uint8_t codec = kNoCodec;
  State state = State::kRuns;
  Message message = Message::kNone;
  Nanos done = 0;  // it ended; 0: it runs
  // The rest is known when it has ended.
  Nanos first_data = 0;   // the first data of another rank were there; 0: none
  Nanos first = 0;        // the first rank of those known came
  Nanos median = 0;       // half of them had come
  Nanos clock_error = 0;  // times of ranks of other hosts are off by this at most
  std::array<Late, 3> latest{};
  Waits::Reason why{};  // this rank did not come sooner
  uint32_t reserved = 0;

  static constexpr uint8_t kNoCodec = 0xff;
};
static_assert(sizeof(OpRecord) == 184 && std::is_trivially_copyable_v<OpRecord>);

// Sums over the operations of a group, for metrics.
struct Totals {
  struct OfKind {
    uint64_t operations = 0, bytes = 0;
    Nanos nanos = 0;  // from when they began to run until they ended
  };
  std::array<OfKind, std::size(kKindTable)> kinds{};  // without those that failed
  uint64_t failed = 0;
  // How long this rank waited, by the rank where the delay began, by its number in errors; as in
  // Inherited where that is not known.
  std::map<int, Nanos> waited;
};

// Training steps of this process, which a hook of torch's optimizers counts.
inline std::atomic<uint32_t> training_step{0};

class Recorder {
 public:
  static constexpr size_t kRecords = 4096;

  // `shown`: the ranks' numbers in errors.  `between_hosts`: a rank may have come late though its
  // arrival is not known.
  explicit Recorder(std::vector<int> shown, bool between_hosts = false,
                    Waits& waits = process_waits);
  // Of the messages of the group whose operations `of_group` records.
  struct OfMessages {};
  Recorder(OfMessages, const Recorder& of_group);
  // Adds the record of an operation that begins, then that of the same one at its end.  By one
  // thread at a time.
  void begin(const OpRecord& record);
  void end(const OpRecord& record);
  // Returns the records from `index` on, oldest first; overwritten ones are missing.  If no record
  // had the index before it, returns all: so a reader of a backend goes on after the backend's
  // group was replaced.  From any thread.
  std::vector<OpRecord> since(uint64_t index) const;

  // Adds an operation or a message that has ended to the sums, and what the program waited in it,
  // since it was `blocked_since`, to the process's waits.  By one thread at a time.
  void count(const OpRecord& record, Nanos blocked_since = 0);
  // From any thread.  An operation that ends meanwhile may be in some of the sums only.
  void addTo(Totals& totals) const;

  // Sets when ranks came: `first`, `median`, `latest` and `known`, and `first_data` if it is 0.
  // `arrived`: by position; 0: not known.  `why`: of a position.
  template <class Why>
  void setArrivals(OpRecord& record, const std::vector<Nanos>& arrived, const RankMap& ranks,
                   Why why);
  // Why this rank comes no sooner to an operation that was called at `called`.
  Waits::Reason reason(Nanos called) const {
    const Nanos since = std::max(last_, group_.set->met.load(std::memory_order_relaxed));
    return waits_.reason(*group_.set, since, called);
  }
  // The same of a message between two ranks, where the one before was called at `since`.
  Waits::Reason reason(int rank, int peer, Nanos since, Nanos called) const {
    return waits_.reason(shown_[static_cast<size_t>(rank)], shown_[static_cast<size_t>(peer)],
                         since, called);
  }
  // This rank has come to an operation; `by_all`: for which all wait.
  void meet(Nanos arrived, bool by_all) {
    last_ = arrived;
    if (by_all) group_.set->met.store(arrived, std::memory_order_relaxed);
  }
  uint32_t id() const { return group_.id; }                                // as in Waits
  uint64_t next() const { return next_.load(std::memory_order_relaxed); }  // index

  std::mutex writer;  // where several threads put records

 private:
  using Words = std::array<uint64_t, sizeof(OpRecord) / sizeof(uint64_t)>;
  // The words that are known when an operation begins, and the first of them that may change.
  static constexpr size_t kHead = offsetof(OpRecord, first_data) / sizeof(uint64_t);
  static constexpr size_t kChanged = offsetof(OpRecord, known) / sizeof(uint64_t);
  void put(const OpRecord& record, size_t from, size_t to);
  // `version` is odd while the words change.
  struct Slot {
    std::atomic<uint64_t> version;
    std::array<std::atomic<uint64_t>, std::tuple_size_v<Words>> words;
  };
  struct Sums {
    std::atomic<uint64_t> operations, bytes, nanos;
  };
  // By number in errors; ranks of other groups, as many as there is room for.
  struct OfRank {
    std::atomic<int> rank{Inherited::kNone};
    std::atomic<uint64_t> nanos{0};
  };
  struct Frees {
    void operator()(Slot* slots) const;
  };
  void countWait(const OpRecord& record, Nanos blocked_since);
  void waitedFor(const OpRecord& record, int rank, Nanos from, Nanos until, Nanos blocked_since);
  Nanos usualOf(const OpRecord& record);

  const std::vector<int> shown_;
  const bool between_hosts_;
  Waits& waits_;
  const Waits::Group group_;
  const std::unique_ptr<Slot[], Frees> slots_;
  std::atomic<uint64_t> next_{0};
  Nanos last_ = 0;                            // when this rank came to the latest operation
  std::vector<std::pair<Nanos, int>> known_;  // arrivals and positions
  std::array<Sums, std::size(kKindTable)> kinds_{};
  std::atomic<uint64_t> failed_{0};
  // Those of the group, then others as they are waited for.
  std::vector<OfRank> waited_;
  // The usual time of an operation of a kind and size, without late ranks.
  struct Usual {
    uint64_t of = 0;
    Nanos nanos = 0;
  };
  std::array<Usual, 64> usual_{};
};

template <class Why>
void Recorder::setArrivals(OpRecord& record, const std::vector<Nanos>& arrived,
                           const RankMap& ranks, Why why) {
  if (arrived.size() == 1) {
    record.known = 1;
    record.first = record.median = arrived[0];
    return;
  }
  known_.clear();
  for (size_t p = 0; p < arrived.size(); ++p)
    if (arrived[p] != 0) known_.emplace_back(arrived[p], static_cast<int>(p));
  record.known = static_cast<uint32_t>(known_.size());
  record.latest = {};
  if (known_.empty()) return;
  if (known_.size() > 2)
    std::ranges::sort(known_);
  else if (known_.back() < known_.front())  // most groups are small, and so are their calls
    std::swap(known_.front(), known_.back());
  record.first = known_.front().first;
  record.median = known_[(known_.size() - 1) / 2].first;
  // In shared memory a rank's data are there soon after it has come.
  if (record.first_data == 0 && known_.size() > 1)
    record.first_data = std::max(record.arrived, known_[record.first == record.arrived].first);
  for (size_t i = 0; i < std::min(known_.size() - 1, record.latest.size()); ++i) {
    const auto& [came, position] = known_[known_.size() - 1 - i];
    record.latest[i] = {ranks.rankAt(position), static_cast<float>(came - record.median),
                        why(position)};
  }
}

// The record of an operation while it runs.
struct Recording {
  Recorder& recorder;
  OpRecord record;
  Nanos blocked_since = 0;  // since when the program waits for its end; kNever: it does not

  void describe(const OpSignature& signature, const RankMap& ranks);
  void begin(Nanos arrived);
  void end(OpRecord::State state);
};

// Keeps the records of the messages of an epoch.
class MessageRecorder final : public MessageObserver {
 public:
  // `shares`: those of another epoch may put records at the same time.
  MessageRecorder(Recorder& recorder, const RankMap& ranks, int rank, bool shares)
      : recorder_(recorder),
        ranks_(ranks),
        rank_(rank),
        shares_(shares),
        last_(ranks.ranks().size()) {}
  Inherited onPost(int peer, Nanos at) override;
  void onEnd(const Delivery& delivery, Nanos at, bool failed) override;
  // The record of a message that is not over, without its index.
  static OpRecord recordOf(const Delivery& delivery, const RankMap& ranks);

 private:
  Recorder& recorder_;
  const RankMap& ranks_;
  const int rank_;
  const bool shares_;
  std::vector<Nanos> last_;  // by position: when the last message to or from it was posted
};

}  // namespace ringreduce
