// Measures whether coding shortens a step: some steps go exact and some coded, in turn, and the
// ranks average their times.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace ringreduce {

// Seconds of a step's operations, and of the whole step, from its first bucket to the next step's.
struct StepTimes {
  double operations, step;
};

class AutoTuner {
 public:
  enum class Mode { kExact, kCoded };
  // Medians of the exact and of the coded steps, which the ranks average.
  using Numbers = std::array<double, 4>;

  // Each mode once to warm up (connections, memory), then in pairs.  The order in a pair changes,
  // so that a drift affects both modes.
  Mode next() const { return kOrder[steps_ % kOrder.size()]; }
  // The times of a step in the mode that `next` returned.
  void record(const StepTimes& times);
  // Whether the ranks should exchange numbers: after the first pair, and after the last.
  bool hasPair() const { return steps_ == kWarm + 2 || isOver(); }
  bool isOver() const { return steps_ == kOrder.size(); }
  Numbers numbers() const;

  // Whether to code, by the averages of all ranks; nothing if more steps should be measured.  `why`
  // gives the reason in words.
  std::optional<bool> decide(const Numbers& all, std::string& why) const;

 private:
  static constexpr size_t kWarm = 2;
  static constexpr std::array kOrder{Mode::kExact, Mode::kCoded,                              //
                                     Mode::kExact, Mode::kCoded, Mode::kCoded, Mode::kExact,  //
                                     Mode::kExact, Mode::kCoded, Mode::kCoded, Mode::kExact};
  size_t steps_ = 0;
  std::vector<StepTimes> exact_, coded_;
};

}  // namespace ringreduce
