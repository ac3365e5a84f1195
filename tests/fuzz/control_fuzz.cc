// What reads the control connections, fed anything in any pieces.
//
// The first byte says how many ranks there are, the second in what pieces the rest comes.  Whatever
// comes: the frames do not depend on the pieces, each names ranks of the group alone and is written
// as it was read, nothing is read after what cannot be, and a rank that is told it all can tell it
// on, once.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <variant>
#include <vector>

#include "control/control_frames.h"
#include "fuzz.h"

using namespace ringreduce;
using namespace ringreduce::net;

namespace {

struct Read {
  std::vector<ControlFrame> frames;
  std::string bytes;  // of these frames, as they are written
  bool failed = false;
};

Read readAll(const std::string& input, int size, size_t piece) {
  ControlReader reader(size);
  Read read;
  for (size_t at = 0; at < input.size(); at += piece) {
    const std::string part = input.substr(at, piece);
    reader.feed({reinterpret_cast<const std::byte*>(part.data()), part.size()});
    while (const auto frame = reader.next()) {
      read.frames.push_back(*frame);
      read.bytes += encode(*frame);
    }
  }
  read.failed = reader.failed();
  return read;
}

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "control_fuzz: %s\n", what);
  std::abort();
}

std::vector<int> ranksIn(const ControlFrame& frame) {
  if (const auto* f = std::get_if<Departed>(&frame)) return {f->rank};
  if (const auto* f = std::get_if<GroupFailure>(&frame)) return {f->culprit, f->reporter};
  if (const auto* f = std::get_if<Broken>(&frame)) return {f->reporter, f->rank};
  if (const auto* f = std::get_if<Question>(&frame)) return {f->asker};
  if (const auto* f = std::get_if<Answer>(&frame)) {
    std::vector<int> ranks = f->stopped;
    ranks.push_back(f->rank);
    if (f->there.waits_for != -1) ranks.push_back(f->there.waits_for);
    if (f->there.last.root != kNoRoot) ranks.push_back(f->there.last.root);
    for (const Announcement& a : f->there.earlier)
      if (a.root != kNoRoot) ranks.push_back(a.root);
    return ranks;
  }
  return {};
}

bool isOfGroup(const std::vector<ControlFrame>& frames, int size) {
  return std::all_of(frames.begin(), frames.end(), [&](const ControlFrame& frame) {
    const std::vector<int> ranks = ranksIn(frame);
    return std::all_of(ranks.begin(), ranks.end(), [&](int r) { return r >= 0 && r < size; });
  });
}

// Takes a frame as a rank does; true if it was news.
bool tell(ControlState& state, Outbox& outbox, const ControlFrame& frame) {
  using Kind = Outbox::Kind;
  if (const auto* f = std::get_if<Departed>(&frame)) {
    if (!state.depart(f->rank, f->how)) return false;
    outbox.add({Kind::kDeparture, f->rank});
  } else if (const auto* f = std::get_if<GroupFailure>(&frame)) {
    if (state.failure) return false;
    state.failure = *f;
    outbox.add({Kind::kFailure, 0});
  } else if (const auto* f = std::get_if<Broken>(&frame)) {
    const auto number = state.broke(*f);
    if (!number) return false;
    outbox.add({Kind::kBroken, *number});
  } else if (const auto* f = std::get_if<Question>(&frame)) {
    if (!state.asked(*f)) return false;
    outbox.add({Kind::kQuestion, f->asker});
  } else if (const auto* f = std::get_if<Answer>(&frame)) {
    if (!state.answered(*f)) return false;
    outbox.add({Kind::kAnswer, f->rank});
  } else {
    return false;
  }
  return true;
}

std::string takeAll(const ControlState& state, Outbox& outbox) {
  std::string all;
  for (std::string some;; some.clear()) {
    state.take(outbox, true, some);
    if (some.empty()) return all;
    all += some;
  }
}

int sizeOf(const uint8_t* data) {
  return 1 + data[0] % 64;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const int ranks = sizeOf(data);
  const std::string input(reinterpret_cast<const char*>(data) + 2, size - 2);
  const Read whole = readAll(input, ranks, input.size() + 1);
  const Read pieces = readAll(input, ranks, 1 + data[1] % 7);
  require(whole.bytes == pieces.bytes && whole.failed == pieces.failed,
          "frames depend on the pieces in which they come");
  require(input.compare(0, whole.bytes.size(), whole.bytes) == 0,
          "a frame is not written as it was read");
  require(isOfGroup(whole.frames, ranks), "a frame names a rank that the group has not");

  ControlState here(ranks), there(ranks);
  Outbox outbox, onward, nowhere;
  for (const ControlFrame& frame : whole.frames) tell(here, outbox, frame);
  const Read told = readAll(takeAll(here, outbox), ranks, 1 << 20);
  require(!told.failed && outbox.empty(), "what is told on cannot be read");
  for (const ControlFrame& frame : told.frames) require(tell(there, onward, frame), "told twice");
  for (const ControlFrame& frame : whole.frames)
    require(!tell(there, nowhere, frame), "something was not told on");
  Outbox all = there.all();
  for (const ControlFrame& frame : readAll(takeAll(there, all), ranks, 1 << 20).frames)
    require(!tell(here, nowhere, frame), "ranks that told each other all know different things");
  return 0;
}

namespace fuzz {

// The protection is that of rank numbers: without it frames of a larger group are believed.
Trial control(const uint8_t* data, size_t size) {
  if (size < 2) return {false, false};
  const std::string input(reinterpret_cast<const char*>(data) + 2, size - 2);
  const Read own = readAll(input, sizeOf(data), input.size() + 1);
  const Read larger = readAll(input, kMostControlRanks, input.size() + 1);
  return {.reached = !own.frames.empty(), .seen = !isOfGroup(larger.frames, sizeOf(data))};
}

}  // namespace fuzz
