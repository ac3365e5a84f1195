// All states that a small concurrent program can come into: see interleavings.h.
#pragma once

#include <bit>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <utility>
#include <vector>

#include "interleavings.h"

namespace interleavings {

struct Explored {
  uint64_t states = 0;
  bool race = false, deadlock = false, lost_signal = false;
  bool fine() const { return !race && !deadlock && !lost_signal; }
};

// A set of 64-bit numbers, for millions of them.
class NumberSet {
 public:
  NumberSet() : table_(size_t{1} << 12, kNone) {}
  // Whether it was not there before.
  bool insert(uint64_t number) {
    if (2 * size_ >= table_.size()) {
      std::vector<uint64_t> old(2 * table_.size(), kNone);
      old.swap(table_);
      for (uint64_t n : old)
        if (n != kNone) table_[place(n)] = n;
    }
    uint64_t& at = table_[place(number)];
    if (at == number) return false;
    at = number;
    ++size_;
    return true;
  }
  size_t size() const { return size_; }

 private:
  static constexpr uint64_t kNone = ~uint64_t{0};
  size_t place(uint64_t number) const {
    const uint64_t hash = number * 0x9e3779b97f4a7c15u;
    size_t i = (hash ^ hash >> 32) & (table_.size() - 1);
    while (table_[i] != kNone && table_[i] != number) i = (i + 1) & (table_.size() - 1);
    return i;
  }
  std::vector<uint64_t> table_;
  size_t size_ = 0;
};

class Explorer {
 public:
  explicit Explorer(const Program& program) : program_(program), lanes_(program.lanes.size()) {
    std::map<std::pair<size_t, uint64_t>, std::pair<size_t, size_t>> published;
    std::map<size_t, size_t> words;
    size_t accesses = 0;
    std::vector<std::pair<std::vector<size_t>, std::vector<size_t>>> touched;  // read, written
    const Pieces pieces(program);
    for (size_t l = 0; l < lanes_; ++l) {
      nodes_.emplace_back();
      for (const Step& step : program.lanes[l]) {
        Node& node = nodes_[l].emplace_back(Node{step.what, 0, 0});
        if (step.what == Step::Do::kPublish || step.what == Step::Do::kPost)
          published[{step.at, step.n}] = {l, nodes_[l].size()};
        else if (step.what == Step::Do::kBarrier)
          node.at = step.at;
        else if (step.what == Step::Do::kAccess)
          node.at = accesses++, touched.push_back({pieces.of(step.reads), pieces.of(step.writes)});
        else if (step.what != Step::Do::kWait && step.what != Step::Do::kFind)
          node.at = words.emplace(step.at, words.size()).first->second;
      }
      shift_.push_back(bits_);
      bits_ += static_cast<unsigned>(std::bit_width(nodes_[l].size()));
    }
    words_shift_ = bits_;
    bits_ += static_cast<unsigned>(words.size());
    if (bits_ > 63) throw std::runtime_error("the program is too large to explore");
    for (size_t word : program.set)
      if (const auto used = words.find(word); used != words.end())
        first_ |= uint64_t{1} << (words_shift_ + used->second);
    for (size_t l = 0; l < lanes_; ++l)
      for (size_t i = 0; i < nodes_[l].size(); ++i)
        if (const Step& step = program.lanes[l][i];
            step.what == Step::Do::kWait || step.what == Step::Do::kFind) {
          const auto by = published.find({step.at, step.n});
          nodes_[l][i].at = by == published.end() ? 0 : by->second.first;
          nodes_[l][i].from = by == published.end() ? ~size_t{0} : by->second.second;
          const auto over = published.upper_bound({step.at, step.n});
          if (over != published.end() && over->first.first == step.at)
            nodes_[l][i].until = over->second.second;
        }
    conflict_.assign(accesses, std::vector<bool>(accesses));
    for (size_t a = 0; a < accesses; ++a)
      for (size_t b = 0; b < accesses; ++b)
        conflict_[a][b] = meet(touched[a].second, touched[b].first) ||
                          meet(touched[a].second, touched[b].second) ||
                          meet(touched[a].first, touched[b].second);
  }

  Explored run(uint64_t most) {
    seen_.insert(first_);
    todo_.push_back(first_);
    while (!todo_.empty()) {
      const uint64_t state = todo_.back();
      todo_.pop_back();
      visit(state);
      if (seen_.size() > most) throw std::runtime_error("more states than expected");
    }
    found_.states = seen_.size();
    return found_;
  }

 private:
  struct Node {
    Step::Do what;
    size_t at;    // kAccess: its number; kWait, kFind: who publishes; a group; a word's bit
    size_t from;  // kWait, kFind: where that lane is once it has
    size_t until = ~size_t{0};  // kFind: where it is once it has written over that
  };

  void visit(uint64_t state) {
    using Do = Step::Do;
    std::vector<size_t>& at = position_;
    at.resize(lanes_);
    for (size_t l = 0; l < lanes_; ++l)
      at[l] = state >> shift_[l] & ((uint64_t{1} << std::bit_width(nodes_[l].size())) - 1);
    const auto go = [&](uint64_t to) {
      if (seen_.insert(to)) todo_.push_back(to);
    };
    bool ended = true, moved = false;
    for (size_t l = 0; l < lanes_; ++l) {
      if (at[l] == nodes_[l].size()) continue;
      ended = false;
      const Node& node = nodes_[l][at[l]];
      const uint64_t next = state + (uint64_t{1} << shift_[l]);
      const bool word = node.what == Do::kSet || node.what == Do::kAwait || node.what == Do::kTake;
      const uint64_t bit = word ? uint64_t{1} << (words_shift_ + node.at) : 0;
      switch (node.what) {
        case Do::kAccess:
          for (size_t m = 0; m < l; ++m)
            if (at[m] < nodes_[m].size() && nodes_[m][at[m]].what == Do::kAccess)
              found_.race |= conflict_[node.at][nodes_[m][at[m]].at];
          go(next);
          break;
        case Do::kPublish:
        case Do::kPost:
          go(next);
          break;
        case Do::kFind:  // what is written over may never be found
          if (at[node.at] < node.from) continue;
          found_.race |= at[node.at] >= node.until;
          go(next);
          break;
        case Do::kWait:
          if (at[node.at] < node.from) continue;
          go(next);
          break;
        case Do::kBarrier: {
          uint64_t together = state;
          bool all = true;
          for (size_t m : program_.groups[node.at]) {
            all &= at[m] < nodes_[m].size() && nodes_[m][at[m]].what == Do::kBarrier &&
                   nodes_[m][at[m]].at == node.at;
            together += uint64_t{1} << shift_[m];
          }
          if (!all) continue;
          go(together);
          break;
        }
        case Do::kAwait:
          if (!(state & bit)) continue;
          go(next);
          break;
        case Do::kSet:
          if (state & bit)
            found_.lost_signal = true;
          else
            go(next | bit);
          break;
        case Do::kTake:
          if (state & bit)
            go(next & ~bit);
          else
            found_.lost_signal = true;
          break;
      }
      moved = true;
    }
    found_.deadlock |= !ended && !moved;
  }

  static bool meet(const std::vector<size_t>& a, const std::vector<size_t>& b) {
    for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
      if (a[i] == b[j]) return true;
      a[i] < b[j] ? ++i : ++j;
    }
    return false;
  }

  const Program& program_;
  const size_t lanes_;
  std::vector<std::vector<Node>> nodes_;
  std::vector<std::vector<bool>> conflict_;
  std::vector<unsigned> shift_;
  unsigned bits_ = 0, words_shift_ = 0;
  std::vector<size_t> position_;
  uint64_t first_ = 0;  // state
  NumberSet seen_;
  std::vector<uint64_t> todo_;
  Explored found_;
};

inline Explored explore(const Program& program, uint64_t most = 20'000'000) {
  return Explorer(program).run(most);
}

}  // namespace interleavings
