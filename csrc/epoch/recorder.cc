// The ring of records, each behind a version that tells its readers of changes (a seqlock).
#include "epoch/recorder.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <new>
#include <utility>

namespace ringreduce {
namespace {

// Waits that the latency of a busy machine explains are left out of what is passed on.
constexpr Nanos kLeastUnknown = kMillisecond;
// Ranks of other groups for which there are sums; more are left out of these.
constexpr size_t kOthers = 128;

// One thread writes, so an addition need not be atomic.
template <class Value>
void add(std::atomic<uint64_t>& sum, Value value) {
  sum.store(sum.load(std::memory_order_relaxed) + static_cast<uint64_t>(value),
            std::memory_order_relaxed);
}

// Whether all ranks wait for the last one.
bool waitsByAll(const OpRecord& record) {
  return record.message == OpRecord::Message::kNone && record.root == kNoRoot;
}

}  // namespace

// From calloc: a group that runs few operations uses little of it.
Recorder::Recorder(std::vector<int> shown, bool between_hosts, Waits& waits)
    : shown_(std::move(shown)),
      between_hosts_(between_hosts),
      waits_(waits),
      group_(waits.makeGroup(shown_)),
      slots_(static_cast<Slot*>(std::calloc(kRecords, sizeof(Slot)))),
      waited_(shown_.size() + kOthers) {
  if (!slots_) throw std::bad_alloc();
  for (size_t r = 0; r < shown_.size(); ++r) waited_[r].rank = shown_[r];
}

Recorder::Recorder(OfMessages, const Recorder& of_group)
    : shown_(of_group.shown_),
      between_hosts_(of_group.between_hosts_),
      waits_(of_group.waits_),
      group_(of_group.group_),
      slots_(static_cast<Slot*>(std::calloc(kRecords, sizeof(Slot)))),
      waited_(of_group.waited_.size()) {
  if (!slots_) throw std::bad_alloc();
  for (size_t r = 0; r < shown_.size(); ++r) waited_[r].rank = shown_[r];
}

void Recorder::Frees::operator()(Slot* slots) const {
  std::free(slots);
}

// The release of each word follows the odd version, and the acquire of each precedes the second
// look at the version: a reader that sees a new word sees that the version has changed.
void Recorder::put(const OpRecord& record, size_t from, size_t to) {
  Slot& slot = slots_[record.index % kRecords];
  const auto words = std::bit_cast<Words>(record);
  const uint64_t version = slot.version.load(std::memory_order_relaxed);
  slot.version.store(version + 1, std::memory_order_relaxed);
  for (size_t i = from; i < to; ++i) slot.words[i].store(words[i], std::memory_order_release);
  slot.version.store(version + 2, std::memory_order_release);
  next_.store(record.index + 1, std::memory_order_release);
}

void Recorder::begin(const OpRecord& record) {
  put(record, 0, kHead);
}

// One that was refused has no beginning.
void Recorder::end(const OpRecord& record) {
  put(record, record.arrived != 0 && next() == record.index + 1 ? kChanged : 0,
      std::tuple_size_v<Words>);
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
    // Of an operation that runs, the rest is that of an earlier one.
    if (std::bit_cast<OpRecord>(words).state == OpRecord::State::kRuns) {
      static constexpr auto kEmpty = std::bit_cast<Words>(OpRecord{});
      std::ranges::copy(kEmpty.begin() + kHead, kEmpty.end(), words.begin() + kHead);
    }
    const auto record = std::bit_cast<OpRecord>(words);
    if (version != 0 && record.index == index) found.push_back(record);
  }
  return found;
}

void Recorder::count(const OpRecord& record, Nanos blocked_since) {
  if (record.message == OpRecord::Message::kNone) {
    if (record.state == OpRecord::State::kFailed) return add(failed_, 1);
    Sums& sums = kinds_[static_cast<size_t>(record.kind)];
    add(sums.operations, 1);
    add(sums.bytes, record.bytes);
    add(sums.nanos, record.done - record.arrived);
  }
  if (record.state == OpRecord::State::kDone) countWait(record, blocked_since);
}

// Puts the wait on the rank where the delay began.
void Recorder::countWait(const OpRecord& record, Nanos blocked_since) {
  const OpRecord::Late& last = record.latest[0];
  const bool may_hide = between_hosts_ && waitsByAll(record);
  const Nanos usual = may_hide ? usualOf(record) : 0;
  Nanos until = record.arrived;  // of the wait whose reason is known
  // This rank's own delay, if it was the last one, was rounded to a float too.
  if (last.rank >= 0 && static_cast<float>(record.arrived - record.median) < last.nanos) {
    // A root may end before the last rank comes.
    const Nanos came = std::min(record.median + static_cast<Nanos>(last.nanos), record.done);
    if (came - record.arrived > record.clock_error) {
      until = came - record.clock_error;
      // What this rank itself waited for the same one has delayed both.
      const Inherited& own = record.why.told;
      const Nanos common = last.why.rank == own.rank ? own.nanos() : 0;
      const Nanos inherited =
          std::clamp<Nanos>(last.why.nanos() - common, 0, until - record.arrived);
      waitedFor(record, last.why.rank, record.arrived, record.arrived + inherited, blocked_since);
      waitedFor(record, shown_[static_cast<size_t>(last.rank)], record.arrived + inherited, until,
                blocked_since);
    }
  }
  // A rank that is not seen was late, or a line was slow: this rank itself is not to blame.
  if (may_hide) {
    const Nanos from = std::max(until, record.arrived + usual);
    if (record.done - from > kLeastUnknown)
      waitedFor(record, Inherited::kUnknown, from, record.done, blocked_since);
  }
}

void Recorder::waitedFor(const OpRecord& record, int rank, Nanos from, Nanos until,
                         Nanos blocked_since) {
  if (rank == Inherited::kNone || until <= from) return;
  if (rank != Inherited::kUnknown) {
    for (OfRank& of : waited_) {
      const int known = of.rank.load(std::memory_order_relaxed);
      if (known != rank && known != Inherited::kNone) continue;
      add(of.nanos, until - from);
      if (known != rank) of.rank.store(rank, std::memory_order_release);
      break;
    }
  }
  from = std::max(from, blocked_since);
  if (until > from && until - from >= Waits::kLeast)
    waits_.add({.from = from,
                .until = until,
                .rank = rank,
                .sequence = static_cast<uint32_t>(record.sequence),
                .group = id(),
                .set = group_.set->id,
                .in_message = record.message != OpRecord::Message::kNone,
                // A slow line delays some ranks alone.
                .by_all = rank != Inherited::kUnknown && waitsByAll(record)});
}

// Follows the shorter ones.
Nanos Recorder::usualOf(const OpRecord& record) {
  const uint64_t of = (record.bytes + 1) * 64 + static_cast<uint64_t>(record.kind);
  Usual& usual = usual_[(of * 0x9e3779b97f4a7c15u) >> 58];
  const Nanos took = record.done - record.arrived;
  if (usual.of != of) {
    usual = {of, took};
    return took;
  }
  const Nanos before = usual.nanos;
  usual.nanos += took < before ? (took - before) / 2 : std::min(took - before, before) / 16;
  return before;
}

void Recorder::addTo(Totals& totals) const {
  const auto read = [](const std::atomic<uint64_t>& sum) {
    return sum.load(std::memory_order_relaxed);
  };
  totals.failed += read(failed_);
  for (size_t k = 0; k < kinds_.size(); ++k) {
    totals.kinds[k].operations += read(kinds_[k].operations);
    totals.kinds[k].bytes += read(kinds_[k].bytes);
    totals.kinds[k].nanos += static_cast<Nanos>(read(kinds_[k].nanos));
  }
  for (const OfRank& of : waited_) {
    const int rank = of.rank.load(std::memory_order_acquire);
    if (rank == Inherited::kNone) break;
    if (const uint64_t nanos = read(of.nanos)) totals.waited[rank] += static_cast<Nanos>(nanos);
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
  recorder.meet(arrived, waitsByAll(record));
  recorder.begin(record);
}

void Recording::end(OpRecord::State state) {
  record.done = monotonicNow();
  if (record.posted == 0) record.posted = record.done;  // the group had failed before
  record.state = state;
  recorder.end(record);
  recorder.count(record, blocked_since);
}

// ---- messages

Inherited MessageRecorder::onPost(int peer, Nanos at) {
  if (peer < 0) return {};
  const Nanos since = std::exchange(last_[static_cast<size_t>(peer)], at);
  return recorder_.reason(ranks_.rankAt(rank_), ranks_.rankAt(peer), since, at).told;
}

OpRecord MessageRecorder::recordOf(const Delivery& delivery, const RankMap& ranks) {
  const Message& m = delivery.message;
  const bool sends = m.direction == Message::Direction::kSend;
  const int peer = delivery.source != kAnySource ? delivery.source : m.peer;
  OpRecord record{.sequence = delivery.id,
                  .bytes = m.bytes(),
                  .posted = delivery.called,
                  .arrived = delivery.awaited != 0 ? delivery.awaited : delivery.called};
  record.step = training_step.load(std::memory_order_relaxed);
  record.bucket = static_cast<uint32_t>(m.tag);
  record.known = 1;
  record.root = peer >= 0 ? ranks.rankAt(peer) : peer;
  record.dtype = m.dtype;
  record.message = sends ? OpRecord::Message::kSend : OpRecord::Message::kReceive;
  record.why.told = delivery.why;
  return record;
}

void MessageRecorder::onEnd(const Delivery& delivery, Nanos at, bool failed) {
  std::unique_lock lock(recorder_.writer, std::defer_lock);
  if (shares_) lock.lock();
  OpRecord record = recordOf(delivery, ranks_);
  record.index = recorder_.next();
  record.done = std::max(at, delivery.called);  // another thread may have read the clock before
  record.state = failed ? OpRecord::State::kFailed : OpRecord::State::kDone;
  // No thread waited for the message before it ended.
  if (delivery.awaited == 0 || delivery.awaited > record.done) record.arrived = record.done;
  const auto isTime = [](Nanos time) { return time > 0 && time < kNever / 4; };
  if (const Nanos theirs = delivery.peer_posted; isTime(theirs) && record.root >= 0) {
    // They wait for this rank since it called, and it waits since a thread does.
    const Nanos came = theirs + delivery.ahead, own = record.arrived;
    const bool is_late = came > own;
    record.known = 2;
    record.first = record.median = std::min(came, own);
    record.latest[0] = {is_late ? record.root : ranks_.rankAt(rank_),
                        static_cast<float>(std::max(came, own) - record.median),
                        is_late ? delivery.peer_why : delivery.why};
  }
  recorder_.end(record);
  recorder_.count(record);
}

}  // namespace ringreduce
