// Setting something up together: what each rank has to say, and one outcome for all.
//
// Collective calls like any other: all ranks make the same ones, in the same order.
#pragma once

#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "group/group.h"

namespace ringreduce {

// Copies text into a field of such a struct; what is too long is cut off.
template <size_t N>
void setText(char (&field)[N], const std::string& text) {
  field[text.copy(field, N - 1)] = 0;
}

// Everybody's `mine`, by rank: a small struct of plain values.
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

// How a step went at one rank.
struct Account {
  Failure kind = Failure::kNone;
  char text[1000] = {};
};

// Throws, on all ranks, the error of the lowest rank whose account is of one; the group stays
// usable.
void settle(Group& group, const Account& mine);

// Runs `step`, a part of the work that concerns this rank only, and returns if it went well on all
// ranks; else throws the same error on all.
template <class F>
void together(Group& group, F&& step) {
  Account mine;
  try {
    step();
  } catch (const Error& error) {
    mine.kind = error.kind();
    setText(mine.text, error.what());
  } catch (const std::exception& error) {
    mine.kind = Failure::kSetup;
    setText(mine.text, error.what());
  }
  settle(group, mine);
}

}  // namespace ringreduce
