// The extents of a process by address.
#include "cuda/memory/expandable_memory.h"

#include <atomic>
#include <map>
#include <mutex>
#include <utility>

namespace ringreduce::cuda {

namespace {

struct Extents {
  std::mutex mutex;
  std::map<uintptr_t, Extent> by_begin;  // none overlap
  uint64_t last = 0, notes = 0;
  std::function<void()> when_unmapped;
  std::atomic<bool> are_none = true;

  // The extent that holds an address, or null.
  const Extent* at(uintptr_t address) const {
    auto found = by_begin.upper_bound(address);
    if (found == by_begin.begin()) return nullptr;
    --found;
    return address < found->second.end ? &found->second : nullptr;
  }
  void add(Extent extent) {
    by_begin[extent.begin] = extent;
    are_none = false;
  }
  void remove(uintptr_t begin, uintptr_t end) {
    auto next = by_begin.upper_bound(begin);
    if (next != by_begin.begin()) --next;
    while (next != by_begin.end() && next->second.begin < end) {
      const Extent old = next->second;
      if (old.end <= begin) {
        ++next;
        continue;
      }
      next = by_begin.erase(next);
      if (old.begin < begin) by_begin[old.begin] = {old.begin, begin, old.device, old.number};
      if (end < old.end) by_begin[end] = {end, old.end, old.device, old.number};
    }
  }
};

Extents& extents() {
  static auto* all = new Extents;  // never destroyed: an allocator may outlive everything
  return *all;
}

}  // namespace

void noteMapped(int device, uintptr_t at, size_t bytes) {
  if (bytes == 0) return;
  Extents& all = extents();
  const std::lock_guard lock(all.mutex);
  ++all.notes;
  all.remove(at, at + bytes);
  all.add({at, at + bytes, device, ++all.last});
}

void noteUnmapped(uintptr_t at, size_t bytes) {
  Extents& all = extents();
  const std::lock_guard lock(all.mutex);
  ++all.notes;
  all.remove(at, at + bytes);
  if (all.when_unmapped) all.when_unmapped();
}

uint64_t notesSoFar() {
  Extents& all = extents();
  const std::lock_guard lock(all.mutex);
  return all.notes;
}

bool noteAllMapped(const std::vector<Extent>& mapped, uint64_t notes) {
  Extents& all = extents();
  const std::lock_guard lock(all.mutex);
  if (all.notes != notes) return false;
  all.by_begin.clear();
  for (Extent extent : mapped) {
    extent.number = ++all.last;
    all.add(extent);
  }
  return true;
}

void whenUnmapped(std::function<void()> then) {
  Extents& all = extents();
  const std::lock_guard lock(all.mutex);
  all.when_unmapped = std::move(then);
}

std::vector<Extent> extentsOf(const void* data, size_t bytes) {
  Extents& all = extents();
  if (all.are_none || bytes == 0) return {};
  const auto begin = reinterpret_cast<uintptr_t>(data);
  if (bytes > UINTPTR_MAX - begin) return {};
  std::vector<Extent> found;
  const std::lock_guard lock(all.mutex);
  for (uintptr_t at = begin; at < begin + bytes; at = found.back().end) {
    const Extent* const extent = all.at(at);
    if (!extent || (!found.empty() && extent->device != found.front().device)) return {};
    found.push_back(*extent);
  }
  return found;
}

uintptr_t beginOfRun(uintptr_t at, size_t most) {
  Extents& all = extents();
  const std::lock_guard lock(all.mutex);
  uintptr_t begin = at;
  for (const Extent* before = all.at(begin - 1); before && at - before->begin <= most;
       before = all.at(begin - 1))
    begin = before->begin;
  return begin;
}

bool isThere(uintptr_t begin, uintptr_t end, uint64_t number) {
  Extents& all = extents();
  const std::lock_guard lock(all.mutex);
  const Extent* const extent = all.at(begin);
  return extent && extent->number == number && end <= extent->end;
}

}  // namespace ringreduce::cuda
