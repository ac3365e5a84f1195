// The medians of both modes, and the decision.
#include "group/auto_tuner.h"

#include <algorithm>
#include <cstdio>

namespace ringreduce {
namespace {

// Coding must gain at least this share of a step, because it costs accuracy.
constexpr double kGain = 0.03;
// After one pair, only a difference as large as this decides.
constexpr double kClear = 0.5;

double median(const std::vector<StepTimes>& steps, double StepTimes::* of) {
  std::vector<double> values;
  for (const StepTimes& step : steps) values.push_back(step.*of);
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n ? (values[(n - 1) / 2] + values[n / 2]) / 2 : 0;
}

}  // namespace

void AutoTuner::record(const StepTimes& times) {
  const Mode mode = next();
  if (steps_++ >= kWarm) (mode == Mode::kExact ? exact_ : coded_).push_back(times);
}

AutoTuner::Numbers AutoTuner::numbers() const {
  return {median(exact_, &StepTimes::operations), median(coded_, &StepTimes::operations),
          median(exact_, &StepTimes::step), median(coded_, &StepTimes::step)};
}

std::optional<bool> AutoTuner::decide(const Numbers& all, std::string& why) const {
  const auto& [exact, coded, exact_step, coded_step] = all;
  const bool shortens = coded < exact && coded_step < (1 - kGain) * exact_step;
  if (!isOver()) {
    const bool clearly_not = coded * kClear > exact;
    const bool clearly = shortens && coded < kClear * exact && coded_step < kClear * exact_step;
    if (!clearly && !clearly_not) return std::nullopt;
  }
  char text[200];
  std::snprintf(
      text, sizeof text,
      "a step takes %.3g ms coded and %.3g ms exact, of which all-reduces are busy for %.3g "
      "ms and %.3g ms",
      coded_step * 1e3, exact_step * 1e3, coded * 1e3, exact * 1e3);
  why = text;
  return shortens;
}

}  // namespace ringreduce
