// What control connections carry: frames of a type and a length, and how they are read.
//
// The reader is a function of bytes: it may be fed anything in any pieces, keeps no more than one
// frame of the greatest length, and says so when it is fed what no rank would send.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "health/control.h"

namespace ringreduce::net {

inline constexpr size_t kMostText = 8 << 10;      // bytes of a failure's text
inline constexpr size_t kMostFrame = 68 << 10;    // bytes after the head
inline constexpr int kMostControlRanks = 16'000;  // a list of all of them fits a frame

struct Heartbeat {
  bool operator==(const Heartbeat&) const = default;
};
struct Departed {
  int rank = 0;
  Declared how = Declared::kHere;
  bool operator==(const Departed&) const = default;
};
// A connection between two ranks that had one, and neither left.
struct Broken {
  enum class How : uint8_t {
    kEnded,        // the system of `rank` closed it: its process ended
    kUnreachable,  // nothing came from there: it was given up
    kNonsense,     // it carried what no rank would send
    kSilent,       // there is none, and none could be made
  };
  int reporter = 0, rank = 0;
  How how = How::kEnded;
  bool operator==(const Broken&) const = default;
};
struct Question {
  int asker = 0;
  uint64_t number = 0;            // of this asker's
  uint64_t since = kNoOperation;  // also what was announced from there on
  bool operator==(const Question&) const = default;
};
struct Answer {
  int rank = 0;
  uint64_t number = 0;  // of this rank's
  Progress there;
  std::vector<int> stopped;  // other ranks of its host
  bool operator==(const Answer&) const = default;
};
// To a rank that leaves: it is not needed any more.
struct Bridged {
  bool operator==(const Bridged&) const = default;
};

using ControlFrame =
    std::variant<Heartbeat, Departed, GroupFailure, Broken, Question, Answer, Bridged>;

std::string encode(const ControlFrame& frame);

class ControlReader {
 public:
  // Of a group of `size` ranks: any other rank's number is nonsense.
  explicit ControlReader(int size) : size_(size) {}

  // Takes bytes as they come; gives whole frames, in order, to next().
  void feed(std::span<const std::byte> bytes);
  // The next frame, if it is all there.
  std::optional<ControlFrame> next();
  // Whether something came that cannot be: nothing more is read.
  bool failed() const { return failed_; }

 private:
  const int size_;
  std::string bytes_;
  size_t read_ = 0;
  bool failed_ = false;
};

}  // namespace ringreduce::net
