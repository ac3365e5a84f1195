// Compressed gradients for a DDP hook: which elements of its buckets are coded and which travel
// exactly, in which steps, and which residuals (kernels/message.h) error feedback keeps.
//
// A step ends before a bucket with a parameter that the step has already had.  The residuals that a
// step makes come into force only after all its buckets have arrived and are finite: when the next
// step begins, or when the state is read.  After an infinite gradient or an error the residuals
// stay as they were, on all ranks alike, because the results are the same on all ranks.
//
// Thread-safe.  The operations run one at a time, in the order in which they were asked for.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "group/group.h"
#include "kernels/message.h"

namespace ringreduce {

// Seconds of a step's operations, and of the whole step, from its first bucket to the next step's.
struct StepTimes {
  double operations, step;
};

// Finds out whether coding shortens a step: some steps go exact and some coded, in turn, and the
// ranks agree on the times that they measured.
class AutoTuner {
 public:
  enum class Mode { kExact, kCoded };
  // Numbers that the ranks average, each with its own: medians of the exact and of the coded steps.
  using Numbers = std::array<double, 4>;

  // Each way once to warm up (connections, memory), then in pairs, whose order changes so that a
  // drift hits both.
  Mode next() const { return kOrder[steps_ % kOrder.size()]; }
  // Of the step that went the way that `next` said.
  void record(const StepTimes& times);
  // Whether the ranks should exchange numbers: after the first pair, and after the last.
  bool hasPair() const { return steps_ == kWarm + 2 || isOver(); }
  bool isOver() const { return steps_ == kOrder.size(); }
  Numbers numbers() const;

  // Whether to code, by the average of all ranks' numbers; nothing if more steps should be tried.
  // `why` is the reason in words.
  std::optional<bool> decide(const Numbers& all, std::string& why) const;

 private:
  static constexpr size_t kWarm = 2;
  static constexpr std::array kOrder{Mode::kExact, Mode::kCoded,                              //
                                     Mode::kExact, Mode::kCoded, Mode::kCoded, Mode::kExact,  //
                                     Mode::kExact, Mode::kCoded, Mode::kCoded, Mode::kExact};
  size_t steps_ = 0;
  std::vector<StepTimes> exact_, coded_;
};

struct CompressionSettings {
  Codec codec = Codec::kInt8;
  bool automatic = false;  // exact or `codec`, whichever makes steps shorter
  bool feedback = true;
  uint64_t start_after = 0;  // steps that go exact
  CodedSchedule schedule = CodedSchedule::kAuto;
  bool stochastic = false;
  uint64_t seed = 0;
};

// A parameter, known by its number in the list of all.
struct CompressedParameter {
  size_t count;
  bool exact;     // its gradient is never coded
  uint64_t name;  // a hash, for the ranks to compare
};

// One bucket of gradients in dense memory.  The average replaces it.
struct GradientBucket {
  void* data;
  size_t count;
  DType dtype;
  std::vector<Part> parts;  // all of it
  bool last;                // of a step, as far as the caller knows
};

class Compression {
 public:
  Compression(const CompressionSettings& settings, std::vector<CompressedParameter> parameters);
  ~Compression();

  // Throws on all ranks if settings, parameters or steps differ between ranks.  Collective if the
  // group is new or a state was loaded since; `automatic` then measures anew.  `average` calls it
  // first.
  void agree(Group& group);

  // The operations that average a bucket over the group, to be queued in the order of these calls.
  std::vector<Operation> average(const GradientBucket& bucket, Group& group);
  // Notes a bucket that travels by other operations (a sparse one).  The caller calls the result
  // when the bucket has arrived: whether all its elements are finite.
  std::function<void(bool finite)> pass(const std::vector<Part>& parts, bool last, Group& group);

  // ---- the state.  A change throws Error(kArgument) while a step's operations are under way, and
  // drops a step that has not ended.
  // The number of steps so far; setting it is part of loading a state.
  uint64_t steps();
  void setSteps(uint64_t steps);
  // The residual in force; false if there is none.
  bool readResidual(size_t parameter, float* to);
  void writeResidual(size_t parameter, const float* from);
  void scaleResiduals(float factor);
  size_t residualBytes();
  size_t count(size_t parameter) const { return parameters_.at(parameter).count; }

  // "int8", "exact", or "measuring" while `automatic` measures; and why.
  std::string choice();
  std::string why();

 private:
  struct Step;
  enum class Mode { kExact, kCoded, kDraining };
  struct Measured {
    Nanos began;
    double operations;
  };

  void agreeLocked(Group& group);
  void startTuning();
  void begin(Group& group);
  void settle();
  void settleIfOver();
  void requireQuiet();
  bool isMeasured(uint64_t step) const;
  Mode modeOf(uint64_t step, Group& group) const;
  void updateTuner(Group& group);
  void enter(const std::vector<Part>& parts, bool last, Group& group);
  bool continues(const std::vector<Part>& parts) const;
  std::shared_ptr<std::vector<double>> messageOf(size_t bytes);
  Operation exactInPlace(const GradientBucket& bucket, const MessageLayout& layout);
  Operation codedPart(const GradientBucket& bucket, const MessageLayout& layout);
  Operation exactPart(const GradientBucket& bucket, const MessageLayout& layout);
  void track(std::vector<Operation>& operations) const;

  const CompressionSettings settings_;
  const std::vector<CompressedParameter> parameters_;
  size_t usual_ = 0;  // elements of a usual message, by which kAuto chooses

  std::mutex mutex_;  // guards all below
  Residuals residuals_;
  std::shared_ptr<std::vector<double>> message_;  // operations work in it, one at a time
  uint64_t steps_ = 0;
  std::shared_ptr<Step> step_;        // the latest; null once it is settled
  std::optional<AutoTuner> tuner_;    // while `automatic` measures
  std::optional<Measured> measured_;  // the latest step, if the tuner measures it
  bool codes_ = true;                 // the tuner's decision
  std::string why_ = "asked for";
  std::weak_ptr<Group> agreed_;
};

}  // namespace ringreduce
