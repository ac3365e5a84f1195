// The protocol of the control ring without sockets and time: frames, the state that a rank makes of
// them, and its neighbours.
//
// The reader is a function of bytes.  It accepts any bytes in any pieces, keeps at most one frame
// of the greatest length, and fails on a frame that no rank sends.
//
// The state only grows, and a frame that is known already changes nothing.  So frames may arrive in
// any order, repeatedly, over any connection.  An outbox holds names of frames, which become bytes
// when the connection takes some.  So the memory for a rank that does not read is bounded.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/op_signature.h"
#include "transport/wait_guard.h"

namespace ringreduce::net {

inline constexpr size_t kMostText = 8 << 10;      // bytes of a failure's text
inline constexpr size_t kMostFrame = 68 << 10;    // bytes after the head
inline constexpr int kMostControlRanks = 16'000;  // a list of all of them fits a frame

// The progress of a rank.
struct Progress {
  uint64_t announced = 0;                  // operations announced
  Announcement last;                       // the latest of them
  std::vector<Announcement> earlier = {};  // the ones before it, if they were asked for
  int waits_for = -1;                      // the rank that it waits for in that operation, or -1
  bool stopped = false;  // the process is stopped (SIGSTOP, a debugger), as a rank of its host saw
  StreamProgress streams = {};  // of its GPU, if the group has GPUs

  bool operator==(const Progress&) const = default;
};

// For `sent` and `difference` see control/clock_offset.h.
struct Heartbeat {
  Nanos sent = 0;             // by the sender's CLOCK_MONOTONIC; 0: before there is a control ring
  Nanos difference = kNever;  // of heartbeats to the sender; kNever: none came yet
  ClockOffset offset = {};    // the sender's
  bool operator==(const Heartbeat&) const = default;
};
struct Departed {
  int rank = 0;
  Declared how = Declared::kHere;
  bool operator==(const Departed&) const = default;
};
// A connection between two ranks ended, and neither of them had left.
struct Broken {
  enum class How : uint8_t {
    kEnded,        // the kernel of `rank` closed it: its process ended
    kUnreachable,  // it timed out
    kNonsense,     // it carried bytes that no rank sends
    kSilent,       // none could be made
  };
  int reporter = 0, rank = 0;
  How how = How::kEnded;
  bool operator==(const Broken&) const = default;
};
struct Question {
  int asker = 0;
  uint64_t number = 0;            // of this asker's
  uint64_t since = kNoOperation;  // asks also for operations announced from this one on
  bool operator==(const Question&) const = default;
};
struct Answer {
  int rank = 0;
  uint64_t number = 0;  // of this rank's
  Progress there;
  std::vector<int> stopped;  // other ranks of its host whose processes are stopped
  bool operator==(const Answer&) const = default;
};
// To a rank that leaves: its neighbour does not need it any more.
struct Bridged {
  bool operator==(const Bridged&) const = default;
};

using ControlFrame =
    std::variant<Heartbeat, Departed, GroupFailure, Broken, Question, Answer, Bridged>;

std::string encode(const ControlFrame& frame);

class ControlReader {
 public:
  // `size`: of the group.  A frame that names any other rank is refused.
  explicit ControlReader(int size) : size_(size) {}

  // Adds bytes that arrived.
  void feed(std::span<const std::byte> bytes);
  // The next frame, if it has arrived completely.
  std::optional<ControlFrame> next();
  // Whether a frame was refused.  Nothing more is read then.
  bool failed() const { return failed_; }

 private:
  const int size_;
  std::string bytes_;
  size_t read_ = 0;
  bool failed_ = false;
};

// The state that one connection has still to send.
class Outbox {
 public:
  // In the order in which they are sent: the failure before the departures that follow from it, and
  // a departure before the end of a connection.
  enum class Kind : uint8_t { kFailure, kDeparture, kBroken, kQuestion, kAnswer };
  using Item = std::pair<Kind, int>;  // and the rank, or the number of a Broken

  void add(Item item) { items_.insert(item); }
  // Whether all has been taken, except questions and answers, which may be lost.
  bool empty() const { return items_.empty() || items_.begin()->first >= Kind::kQuestion; }

 private:
  friend class ControlState;
  std::set<Item> items_;
};

class ControlState {
 public:
  explicit ControlState(int size);
  int size() const { return static_cast<int>(ranks_.size()); }

  // Each returns whether that was news.
  bool depart(int rank, Declared how);
  bool asked(const Question& question);
  bool answered(const Answer& answer);
  // Returns its number, or none if it was known.
  std::optional<int> broke(const Broken& broken);
  std::optional<GroupFailure> failure;  // set it once

  Declared departure(int rank) const { return at(rank).departure; }
  Progress lastSeen(int rank) const { return at(rank).answer.there; }
  uint64_t questionsOf(int rank) const { return at(rank).questions; }
  uint64_t answersOf(int rank) const { return at(rank).answer.number; }

  // All that is known, for a new connection.
  Outbox all() const;
  // Appends frames to `out`, but not too many at a time.  Questions and answers only if
  // `also_asking`.
  void take(Outbox& from, bool also_asking, std::string& out) const;

 private:
  struct Rank {
    Declared departure = Declared::kHere;
    uint64_t questions = 0, since = kNoOperation;  // asked by it; `since` of the last one
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

// The neighbours of each rank in the control ring, and the ranks that can still be reached.
class ControlRing {
 public:
  // `order` holds each rank once; empty: 0, 1, ... size - 1.
  ControlRing(int size, std::vector<int> order);

  void remove(int rank);  // it has left, or ended
  bool has(int rank) const { return here_[static_cast<size_t>(rank)]; }

  // The first remaining rank after or before `rank`, which may itself have been removed; `rank` if
  // none remains.
  int next(int rank) const { return beside(rank, 1); }
  int previous(int rank) const { return beside(rank, -1); }

  // The remaining ranks that `me` cannot reach any more.  The ring is cut between two neighbours if
  // they are a pair of `cuts`.  `linked`: ranks that `me` has connections with.  Ranks that were
  // removed do not count, in either list.
  using Cuts = std::set<std::pair<int, int>>;  // the smaller rank first
  std::vector<int> beyond(int me, const Cuts& cuts, const std::vector<int>& linked) const;

 private:
  int beside(int rank, int step) const;

  std::vector<int> order_, position_;
  std::vector<bool> here_;
};

inline ControlRing::ControlRing(int size, std::vector<int> order)
    : order_(std::move(order)),
      position_(static_cast<size_t>(size), -1),
      here_(static_cast<size_t>(size), true) {
  if (order_.empty()) {
    order_.resize(static_cast<size_t>(size));
    std::iota(order_.begin(), order_.end(), 0);
  }
  bool fits = order_.size() == position_.size();
  for (size_t i = 0; fits && i < order_.size(); ++i) {
    const int rank = order_[i];
    fits = rank >= 0 && rank < size && position_[static_cast<size_t>(rank)] < 0;
    if (fits) position_[static_cast<size_t>(rank)] = static_cast<int>(i);
  }
  if (!fits)
    throw Error(Failure::kSetup, "the control ring of " + std::to_string(size) +
                                     " ranks must name each of them once");
}

inline void ControlRing::remove(int rank) {
  here_[static_cast<size_t>(rank)] = false;
}

inline int ControlRing::beside(int rank, int step) const {
  const int size = static_cast<int>(order_.size());
  for (int i = 1; i < size; ++i) {
    const int position = (position_[static_cast<size_t>(rank)] + i * step % size + size) % size;
    const int other = order_[static_cast<size_t>(position)];
    if (has(other)) return other;
  }
  return rank;
}

inline std::vector<int> ControlRing::beyond(int me, const Cuts& cuts,
                                            const std::vector<int>& linked) const {
  std::vector<bool> reached(order_.size());
  std::vector<int> from = linked;
  from.push_back(me);
  for (int start : from) {
    if (!has(start)) continue;  // it was removed
    for (int step : {1, -1}) {
      int at = start;
      for (size_t i = 0; i < order_.size(); ++i) {
        reached[static_cast<size_t>(at)] = true;
        const int other = beside(at, step);
        if (other == start || cuts.contains(std::minmax(at, other))) break;
        at = other;
      }
    }
  }
  std::vector<int> ranks;
  for (size_t r = 0; r < reached.size(); ++r)
    if (here_[r] && !reached[r]) ranks.push_back(static_cast<int>(r));
  return ranks;
}

}  // namespace ringreduce::net
