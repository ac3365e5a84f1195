// A step of the set-up that all ranks take: gathers a value of each rank, and gives all ranks the
// same outcome.
//
// These are collective calls: all ranks make the same ones in the same order.
#pragma once

#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "group/group.h"

namespace ringreduce {

// Copies text into a field of a gathered struct, cut off at the field's size.
template <size_t N>
void setText(char (&field)[N], const std::string& text) {
  field[text.copy(field, N - 1)] = 0;
}

// The value of each rank, by rank: a small struct of plain values.
template <class T>
std::vector<T> gatherEach(Group& group, const T& mine) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::vector<T> all(static_cast<size_t>(group.size()), mine);
  AllGather gather{.input = &mine, .dtype = DType::kUInt8};
  for (T& one : all) gather.outputs.push_back(&one);
  gather.counts.assign(all.size(), sizeof(T));
  group.run({gather});
  return all;
}

// How a step went on one rank.
struct StepStatus {
  Failure kind = Failure::kNone;
  char text[1000] = {};
};

// Runs `step`, a part of the work that concerns this rank only, and returns if it succeeded on all
// ranks.  Otherwise throws the error of the lowest rank that failed, on all ranks; the group stays
// usable.
template <class F>
void agreeOnStatus(Group& group, F&& step) {
  StepStatus mine;
  try {
    step();
  } catch (const Error& error) {
    mine.kind = error.kind();
    setText(mine.text, error.what());
  } catch (const std::exception& error) {
    mine.kind = Failure::kSetup;
    setText(mine.text, error.what());
  }
  const std::vector<StepStatus> all = gatherEach(group, mine);
  for (int r = 0; r < group.size(); ++r)
    if (const StepStatus& status = all[static_cast<size_t>(r)]; status.kind != Failure::kNone)
      throw Error(
          status.kind, group.epoch()->peers().who(r) + ": " + status.text,
          {.rank = group.options().shownAs(r), .group = group.options().name, .is_final = false});
}

}  // namespace ringreduce
