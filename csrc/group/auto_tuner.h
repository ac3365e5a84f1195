// Whether coding shortens a step, found by trying: some steps go exact and some coded, in turn, and
// the ranks agree on what they have measured.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace ringreduce {

// What one way took: seconds of a step's operations, and of the whole step, from its first bucket
// to the next step's.
struct StepTimes {
  double operations, step;
};

class AutoTuner {
 public:
  enum class Way { kExact, kCoded };
  // Numbers that the ranks average, each with its own: medians of the exact and of the coded steps.
  using Numbers = std::array<double, 4>;

  // Each way once to warm up (connections, memory), then in pairs, whose order changes so that a
  // drift hits both.
  Way next() const { return kOrder[steps_ % kOrder.size()]; }
  // Of the step that went the way that `next` said.
  void record(const StepTimes& times);
  // Whether the ranks should exchange numbers: after the first pair, and after the last.
  bool hasPair() const { return steps_ == kWarm + 2 || isOver(); }
  bool isOver() const { return steps_ == kOrder.size(); }
  Numbers numbers() const;

  // What everybody's numbers say: whether to code; nothing if more steps should be tried.  `why`
  // says the same in words.
  std::optional<bool> decide(const Numbers& all, std::string& why) const;

 private:
  static constexpr size_t kWarm = 2;
  static constexpr std::array kOrder{Way::kExact, Way::kCoded,                            //
                                     Way::kExact, Way::kCoded, Way::kCoded, Way::kExact,  //
                                     Way::kExact, Way::kCoded, Way::kCoded, Way::kExact};
  size_t steps_ = 0;
  std::vector<StepTimes> exact_, coded_;
};

}  // namespace ringreduce
