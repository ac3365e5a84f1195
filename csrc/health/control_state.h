// What a rank knows of its group, as far as all are to know it; and what of that is still to be
// told over one connection.
//
// All of it only grows, and what is known already is no news, so it does not matter in which order,
// how often or over which connections it comes.  An outbox names things and is turned into bytes
// when its connection takes some, so what waits for a rank that does not read is bounded.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "health/control_frames.h"

namespace ringreduce::net {

class Outbox {
 public:
  // In the order in which they are sent: why the group ended comes before who went then, and a
  // departure before the end of a connection.
  enum class Kind : uint8_t { kFailure, kDeparture, kBroken, kQuestion, kAnswer };
  using Item = std::pair<Kind, int>;  // and whose, or which

  void add(Item item) { items_.insert(item); }
  // Whether everything that matters has been taken: what ranks ask each other may be lost.
  bool empty() const { return items_.empty() || items_.begin()->first >= Kind::kQuestion; }

 private:
  friend class ControlState;
  std::set<Item> items_;
};

class ControlState {
 public:
  explicit ControlState(int size);
  int size() const { return static_cast<int>(ranks_.size()); }

  // Each is true if it is news.
  bool depart(int rank, Declared how);
  bool asked(const Question& question);
  bool answered(const Answer& answer);
  // Its number, or none if it is no news.
  std::optional<int> broke(const Broken& broken);
  std::optional<GroupFailure> failure;  // set it once

  Declared departure(int rank) const { return at(rank).departure; }
  Progress lastSeen(int rank) const { return at(rank).answer.there; }
  uint64_t questionsOf(int rank) const { return at(rank).questions; }
  uint64_t answersOf(int rank) const { return at(rank).answer.number; }

  // What a rank is told to which there is a new connection.
  Outbox all() const;
  // Appends frames to `out`, but not too many at a time; without `also_asking` those alone that
  // matter.
  void take(Outbox& from, bool also_asking, std::string& out) const;

 private:
  struct Rank {
    Declared departure = Declared::kHere;
    uint64_t questions = 0, since = kNoOperation;  // asked by it; what the last one was for
    Answer answer;
  };
  const Rank& at(int rank) const { return ranks_[static_cast<size_t>(rank)]; }
  Rank& at(int rank) { return ranks_[static_cast<size_t>(rank)]; }
  ControlFrame frame(Outbox::Item item) const;

  std::vector<Rank> ranks_;
  std::vector<Broken> broken_;
  std::set<std::pair<int, int>> cut_;  // connections, the smaller rank first
  std::set<int> ended_;
};

}  // namespace ringreduce::net
