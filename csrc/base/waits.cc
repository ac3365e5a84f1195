// The latest waits, searched by an operation that begins after one.
#include "base/waits.h"

#include <pthread.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace ringreduce {

// A forked child has neither the groups nor the waits of its parent, and may make groups.
Waits& Waits::makeOfProcess() {
  static Waits& waits = *new Waits;
  pthread_atfork([] { waits.mutex_.lock(); }, [] { waits.mutex_.unlock(); },
                 [] {
                   waits.sets_.clear();
                   waits.added_ = 0;
                   waits.latest_ = 0;
                   waits.mutex_.unlock();
                 });
  return waits;
}

Waits& process_waits = Waits::makeOfProcess();

Waits::Group Waits::makeGroup(std::vector<int> ranks) {
  std::ranges::sort(ranks);
  const std::lock_guard lock(mutex_);
  std::erase_if(sets_, [](const auto& set) { return set.expired(); });
  std::shared_ptr<RankSet> set;
  for (const auto& known : sets_)
    if (const auto one = known.lock(); one && one->ranks == ranks) set = one;
  if (!set) {
    set = std::make_shared<RankSet>(++last_id_, std::move(ranks));
    sets_.push_back(set);
    for (const auto& known : sets_) {
      const std::shared_ptr<RankSet> one = known.lock();
      if (!one) continue;
      if (std::ranges::includes(one->ranks, set->ranks)) set->around.push_back(one);
      if (one == set || !std::ranges::includes(set->ranks, one->ranks)) continue;
      std::erase_if(one->around, [](const auto& other) { return other.expired(); });
      one->around.push_back(set);
    }
  }
  set->met.store(monotonicNow(), std::memory_order_relaxed);  // its ranks meet here
  return {++last_id_, std::move(set)};
}

void Waits::add(const Wait& wait) {
  const std::lock_guard lock(mutex_);
  kept_[added_++ % kept_.size()] = wait;
  latest_.store(std::max(latest_.load(std::memory_order_relaxed), wait.until),
                std::memory_order_release);
}

Waits::Reason Waits::search(const RankSet& of, Nanos since, Nanos called) const {
  const std::lock_guard lock(mutex_);
  return searchIn(of.around, [](const RankSet&) { return true; }, since, called);
}

Waits::Reason Waits::search(int rank, int peer, Nanos since, Nanos called) const {
  const auto has_both = [&](const RankSet& set) {
    return std::ranges::binary_search(set.ranks, rank) &&
           std::ranges::binary_search(set.ranks, peer);
  };
  const std::lock_guard lock(mutex_);
  return searchIn(sets_, has_both, since, called);
}

// `has_all`: whether a set of `sets` has all ranks of the operation.  With the mutex held.
template <class HasAll>
Waits::Reason Waits::searchIn(const Sets& sets, HasAll has_all, Nanos since, Nanos called) const {
  std::vector<uint32_t> common;
  for (const auto& one : sets) {
    const std::shared_ptr<RankSet> set = one.lock();
    if (!set || !has_all(*set)) continue;
    common.push_back(set->id);
    since = std::max(since, set->met.load(std::memory_order_relaxed));
  }
  struct Sum {
    Reason reason;
    Nanos waited = 0, longest = 0, covered_from = kNever;
  };
  std::vector<Sum> sums;
  const uint64_t kept = std::min<uint64_t>(added_, kept_.size());
  for (uint64_t i = 1; i <= kept; ++i) {
    const Wait& wait = kept_[(added_ - i) % kept_.size()];
    if (wait.until <= since || wait.until > called) continue;
    if (wait.by_all && std::ranges::find(common, wait.set) != common.end()) continue;
    auto sum = std::ranges::find(sums, wait.rank, [](const Sum& s) { return s.reason.told.rank; });
    if (sum == sums.end()) {
      sum = sums.emplace(sums.end());
      sum->reason.told.rank = wait.rank;
    }
    // Waits of two groups at the same time delay the process once.
    const Nanos from = std::max(wait.from, since);
    const Nanos waited = std::max<Nanos>(0, std::min(wait.until, sum->covered_from) - from);
    sum->covered_from = std::min(sum->covered_from, from);
    sum->waited += waited;
    if (waited <= sum->longest) continue;
    sum->longest = waited;
    sum->reason.told.sequence = wait.sequence;
    sum->reason.group = wait.group * 2 + (wait.in_message ? 1 : 0);
  }
  const auto most = std::ranges::max_element(sums, {}, &Sum::waited);
  if (most == sums.end() || most->waited < kLeast) return {};
  most->reason.told.micros = static_cast<uint32_t>(
      std::min<Nanos>(most->waited / kMicrosecond, std::numeric_limits<uint32_t>::max()));
  return most->reason;
}

}  // namespace ringreduce
