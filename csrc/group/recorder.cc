// The ring of records, each behind a version that tells its readers of changes (a seqlock).
#include "group/recorder.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <new>
#include <utility>

namespace ringreduce {

// From calloc: a group that runs few operations uses little of it.
Recorder::Recorder(int ranks)
    : slots_(static_cast<Slot*>(std::calloc(kRecords, sizeof(Slot)))),
      waited_(static_cast<size_t>(ranks)) {
  if (!slots_) throw std::bad_alloc();
}

void Recorder::Frees::operator()(Slot* slots) const {
  std::free(slots);
}

// The release of each word follows the odd version, and the acquire of each precedes the second
// look at the version: a reader that sees a new word sees that the version has changed.
void Recorder::put(const OpRecord& record) {
  Slot& slot = slots_[record.index % kRecords];
  const auto words = std::bit_cast<Words>(record);
  const uint64_t version = slot.version.load(std::memory_order_relaxed);
  slot.version.store(version + 1, std::memory_order_relaxed);
  for (size_t i = 0; i < words.size(); ++i)
    slot.words[i].store(words[i], std::memory_order_release);
  slot.version.store(version + 2, std::memory_order_release);
  next_.store(record.index + 1, std::memory_order_release);
}

std::vector<OpRecord> Recorder::since(uint64_t index) const {
  std::vector<OpRecord> found;
  const uint64_t end = next_.load(std::memory_order_acquire);
  if (index > end) index = 0;
  index = std::max(index, end - std::min<uint64_t>(end, kRecords));
  for (; index < end; ++index) {
    const Slot& slot = slots_[index % kRecords];
    Words words;
    uint64_t version = 0;
    do {
      version = slot.version.load(std::memory_order_acquire);
      for (size_t i = 0; i < words.size(); ++i)
        words[i] = slot.words[i].load(std::memory_order_acquire);
    } while (version % 2 != 0 || version != slot.version.load(std::memory_order_relaxed));
    const auto record = std::bit_cast<OpRecord>(words);
    if (version != 0 && record.index == index) found.push_back(record);
  }
  return found;
}

void Recorder::count(const OpRecord& record) {
  // One thread writes, so an addition need not be atomic.
  const auto add = [](std::atomic<uint64_t>& sum, auto value) {
    sum.store(sum.load(std::memory_order_relaxed) + static_cast<uint64_t>(value),
              std::memory_order_relaxed);
  };
  if (record.state == OpRecord::State::kFailed) return add(failed_, 1);
  Sums& sums = kinds_[static_cast<size_t>(record.kind)];
  add(sums.operations, 1);
  add(sums.bytes, record.bytes);
  add(sums.nanos, record.done - record.arrived);
  const OpRecord::Late& last = record.latest[0];
  // This rank's own delay, if it was the last one, was rounded to a float too.
  if (last.rank < 0 || static_cast<float>(record.arrived - record.median) >= last.nanos) return;
  // A root may end before the last rank comes.
  const Nanos until = std::min(record.median + static_cast<Nanos>(last.nanos), record.done);
  const Nanos wait = until - record.arrived;
  if (wait > record.clock_error)
    add(waited_[static_cast<size_t>(last.rank)], wait - record.clock_error);
}

Totals Recorder::totals() const {
  const auto read = [](const std::atomic<uint64_t>& sum) {
    return sum.load(std::memory_order_relaxed);
  };
  Totals totals;
  totals.failed = read(failed_);
  for (size_t k = 0; k < kinds_.size(); ++k)
    totals.kinds[k] = {read(kinds_[k].operations), read(kinds_[k].bytes),
                       static_cast<Nanos>(read(kinds_[k].nanos))};
  for (const auto& sum : waited_) totals.waited.push_back(static_cast<Nanos>(read(sum)));
  return totals;
}

void Recorder::setArrivals(OpRecord& record, const std::vector<Nanos>& arrived,
                           const RankMap& ranks) {
  known_.clear();
  for (size_t p = 0; p < arrived.size(); ++p)
    if (arrived[p] != 0) known_.emplace_back(arrived[p], ranks.rankAt(static_cast<int>(p)));
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
    const auto& [came, rank] = known_[known_.size() - 1 - i];
    record.latest[i] = {rank, static_cast<float>(came - record.median)};
  }
}

void Recording::describe(const OpSignature& signature, const RankMap& ranks) {
  record.arrived = 0;
  record.sequence = signature.sequence;
  record.kind = signature.kind;
  record.dtype = signature.dtype;
  record.op = signature.op;
  record.root = signature.root == kNoRoot ? kNoRoot : ranks.rankAt(signature.root);
}

void Recording::begin(Nanos arrived) {
  record.arrived = arrived;
  if (record.posted == 0) record.posted = arrived;
  record.state = OpRecord::State::kRuns;
  recorder.put(record);
}

void Recording::end(OpRecord::State state) {
  record.done = monotonicNow();
  if (record.posted == 0) record.posted = record.done;  // the group had failed before
  record.state = state;
  recorder.put(record);
  recorder.count(record);
}

}  // namespace ringreduce
