// Moves residuals between parameters and stores.
#include "kernels/residuals.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace ringreduce {
namespace {

// An element that is not finite would spoil all later steps, so it is dropped.
float kept(float value) {
  return std::isfinite(value) ? value : 0.f;
}

}  // namespace

Residuals::Residuals(std::vector<size_t> counts) {
  for (size_t count : counts) entries_.push_back({.count = count});
}

std::shared_ptr<Residuals::Store> Residuals::storeOf(const MessageLayout& layout) {
  const std::shared_ptr<Store> known = entries_.at(layout.parts().at(0).parameter).store;
  // A step that ended early may have moved only some of the parameters to other stores.
  const auto is_there = [&](const Part& part) { return entries_[part.parameter].store == known; };
  if (known && known->layout == layout && std::ranges::all_of(layout.parts(), is_there))
    return known;

  const auto made = std::make_shared<Store>(
      Store{layout, std::vector<float>(layout.count(), 0), std::vector<float>(layout.count(), 0)});
  std::vector<float> values;
  for (size_t i = 0; i < layout.parts().size(); ++i) {
    const size_t parameter = layout.parts()[i].parameter;
    Entry& entry = entries_.at(parameter);
    values.resize(entry.count);
    if (read(parameter, values.data()))
      layout.forEachRun(i, [&](size_t at, size_t offset, size_t size, size_t) {
        std::copy_n(values.data() + offset, size, made->kept.data() + at);
      });
    entry = {.count = entry.count, .store = made, .place = i};
  }
  return made;
}

bool Residuals::read(size_t parameter, float* to) const {
  const Entry& entry = entries_.at(parameter);
  if (entry.store) {
    entry.store->layout.forEachRun(entry.place, [&](size_t at, size_t offset, size_t size, size_t) {
      std::copy_n(entry.store->kept.data() + at, size, to + offset);
    });
    return true;
  }
  if (entry.loose.empty()) return false;
  std::copy(entry.loose.begin(), entry.loose.end(), to);
  return true;
}

void Residuals::write(size_t parameter, const float* from) {
  Entry& entry = entries_.at(parameter);
  if (entry.store) {
    entry.store->layout.forEachRun(entry.place, [&](size_t at, size_t offset, size_t size, size_t) {
      float* const to = entry.store->kept.data() + at;
      if (from)
        std::transform(from + offset, from + offset + size, to, kept);
      else
        std::fill_n(to, size, 0.f);
    });
  } else if (from) {
    entry.loose.resize(entry.count);
    std::transform(from, from + entry.count, entry.loose.begin(), kept);
  } else {
    entry.loose.clear();
  }
}

void Residuals::scale(float factor) {
  for (const auto& store : stores())
    for (float& value : store->kept) value = kept(value * factor);
  for (Entry& entry : entries_)
    for (float& value : entry.loose) value = kept(value * factor);
}

void Residuals::clear() {
  for (Entry& entry : entries_) entry = {.count = entry.count};
}

bool Residuals::empty() const {
  return std::all_of(entries_.begin(), entries_.end(),
                     [](const Entry& e) { return !e.store && e.loose.empty(); });
}

size_t Residuals::bytes() const {
  size_t elements = 0;
  for (const auto& store : stores()) elements += store->kept.size() + store->made.size();
  for (const Entry& entry : entries_) elements += entry.loose.size();
  return elements * sizeof(float);
}

std::vector<std::shared_ptr<Residuals::Store>> Residuals::stores() const {
  std::vector<std::shared_ptr<Store>> all;
  for (const Entry& entry : entries_)
    if (entry.store && std::find(all.begin(), all.end(), entry.store) == all.end())
      all.push_back(entry.store);
  return all;
}

}  // namespace ringreduce
