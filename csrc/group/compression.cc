// Averages of compressed gradients: the tuner of `automatic`, the agreement of the ranks, steps and
// their residuals, and the operations of one bucket.
#include "group/compression.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/config.h"
#include "base/error.h"
#include "base/text.h"
#include "group/agreement.h"
#include "kernels/message.h"

namespace ringreduce {

// ---- the choice by trying

namespace {

// The least gain by coding, as a share of a step: coding costs accuracy.
constexpr double kGain = 0.03;
// After one pair of steps only a clear difference decides.
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
  const auto ms = [](double time) { return shortText(time * 1e3, 3) + " ms"; };
  why = "a step takes " + ms(coded_step) + " coded and " + ms(exact_step) +
        " exact, of which all-reduces are busy for " + ms(coded) + " and " + ms(exact);
  return shortens;
}

// ---- a step

struct Compression::Step {
  Step(uint64_t number, Mode mode, size_t parameters)
      : number(number), mode(mode), seen(parameters), unseen(parameters) {}

  const uint64_t number;
  const Mode mode;
  const Nanos began = monotonicNow();
  std::vector<bool> seen;  // by parameter
  size_t unseen;
  bool last = false;  // had its last bucket
  std::vector<std::shared_ptr<Residuals::Store>> stores;
  size_t started = 0;  // buckets
  std::atomic<size_t> arrived{0};
  std::atomic<bool> finite{true};
  std::atomic<Nanos> busy{0};  // the time of its operations

  bool complete() const { return last || unseen == 0; }
  bool underWay() const { return arrived != started; }
};

[[noreturn]] inline void refuseGradients(const std::string& why) {
  throw Error(Failure::kArgument, "ringreduce compressed gradients: " + why);
}

Compression::Compression(const CompressionSettings& settings,
                         std::vector<CompressedParameter> parameters)
    : settings_(settings), parameters_(std::move(parameters)), residuals_([this] {
        std::vector<size_t> counts;
        for (const CompressedParameter& parameter : parameters_) counts.push_back(parameter.count);
        return counts;
      }()) {
  // Not the size of each bucket: bits depend on the schedule, and so must not depend on buckets.
  constexpr size_t kBucket = (25 << 20) / sizeof(float);  // DDP's default
  for (const CompressedParameter& parameter : parameters_)
    if (!parameter.exact) usual_ += parameter.count;
  usual_ = std::min(usual_, kBucket);
  if (settings_.automatic) startTuning();
}

Compression::~Compression() = default;

// ---- agreement

namespace {

// Throws a Mismatch that names the ranks whose settings differ.  `own`: a hash of this rank's.
void requireSame(Group& group, uint64_t own) {
  // The greatest and the least, in one call that goes on without lost ranks.
  uint64_t ends[] = {own, ~own};
  group.run({AllReduce{ends, 2, DType::kInt64, ReduceOp::kMax}});
  if (ends[0] == ~ends[1]) return;
  const std::vector<uint64_t> all = gatherEach(group, own);
  // The most frequent value is right; of two as frequent, that of the lowest rank.
  const auto frequency = [&](uint64_t value) { return std::ranges::count(all, value); };
  const uint64_t right = *std::max_element(
      all.begin(), all.end(), [&](uint64_t a, uint64_t b) { return frequency(a) < frequency(b); });
  std::string odd;
  Facts facts{.group = group.options().name};
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r] == right) continue;
    if (odd.empty()) facts.rank = group.options().shownAs(static_cast<int>(r));
    odd += (odd.empty() ? "" : ", ") + group.epoch()->peers().who(static_cast<int>(r));
  }
  throw Error(Failure::kMismatch,
              "compressed gradients: " + odd +
                  " has another codec, error_feedback, schedule, stochastic, "
                  "seed, start_after, choice of exact parameters, number of "
                  "steps so far or model than the other ranks; give all ranks "
                  "the same",
              facts);
}

}  // namespace

void Compression::agree(Group& group) {
  const std::lock_guard lock(mutex_);
  agreeLocked(group);
}

void Compression::agreeLocked(Group& group) {
  if (agreed_.lock().get() == &group) return;
  uint64_t own = steps_;
  for (const uint64_t word :
       {static_cast<uint64_t>(settings_.codec), uint64_t{settings_.automatic},
        uint64_t{settings_.feedback}, settings_.start_after,
        static_cast<uint64_t>(settings_.schedule), uint64_t{settings_.stochastic}, settings_.seed})
    own = mixed(own, word);
  for (const CompressedParameter& parameter : parameters_)
    own = mixed(mixed(mixed(own, parameter.name), parameter.count), parameter.exact);

  requireSame(group, own);
  agreed_ = group.weak_from_this();
  message_ = nullptr;  // operations of the previous group may still use it
  // The rest of a step or of a measurement may differ on ranks that were in other groups before.
  settleIfOver();
  step_ = nullptr;
  measured_.reset();
  if (settings_.automatic) startTuning();
}

void Compression::startTuning() {
  tuner_.emplace();
  codes_ = true;
  why_ = "not known yet";
}

// ---- steps

void Compression::begin(Group& group) {
  const Nanos ended = monotonicNow();
  settle();
  if (tuner_ && measured_ && group.size() > 1) {
    tuner_->record(
        {measured_->operations, static_cast<double>(ended - measured_->began) / kSecond});
    updateTuner(group);
  }
  measured_.reset();
  const Mode mode = modeOf(steps_, group);
  step_ = std::make_shared<Step>(steps_++, mode, parameters_.size());
}

// Puts the residuals of the latest step into force, if it succeeded.
void Compression::settle() {
  if (!step_) return;
  const auto step = std::exchange(step_, nullptr);
  if (!step->complete() || step->underWay()) return;
  if (tuner_ && isMeasured(step->number))
    measured_ = {step->began, static_cast<double>(step->busy) / kSecond};
  if (!step->finite) return;
  for (const auto& store : step->stores) store->kept.swap(store->made);
  if (step->mode == Mode::kDraining) residuals_.clear();
}

void Compression::settleIfOver() {
  if (step_ && step_->complete() && !step_->underWay()) settle();
}

bool Compression::isMeasured(uint64_t step) const {
  return tuner_ && step >= settings_.start_after;
}

Compression::Mode Compression::modeOf(uint64_t step, Group& group) const {
  if (step < settings_.start_after) return Mode::kExact;
  const Mode exact = residuals_.empty() ? Mode::kExact : Mode::kDraining;
  if (group.size() == 1) return exact;
  if (tuner_) return tuner_->next() == AutoTuner::Mode::kCoded ? Mode::kCoded : Mode::kExact;
  return codes_ ? Mode::kCoded : exact;
}

// The ranks decide by the same averages, so they decide alike.
void Compression::updateTuner(Group& group) {
  if (!tuner_->hasPair()) return;
  AutoTuner::Numbers numbers = tuner_->numbers();
  group.run({AllReduce{numbers.data(), numbers.size(), DType::kFloat64, ReduceOp::kAvg}});
  const std::optional<bool> decision = tuner_->decide(numbers, why_);
  if (!decision) return;
  codes_ = *decision;
  tuner_.reset();
  if (group.rank() == 0 && logsInfo())
    log("gradients travel " + (codes_ ? std::string("as ") + name(settings_.codec) : "exactly") +
        " from now on: " + why_);
}

// Whether the bucket belongs to the step under way.
bool Compression::continues(const std::vector<Part>& parts) const {
  return step_ && !step_->complete() &&
         std::ranges::none_of(parts, [&](const Part& part) { return step_->seen[part.parameter]; });
}

// A bucket of the step under way, or of the next one.
void Compression::enter(const std::vector<Part>& parts, bool last, Group& group) {
  agreeLocked(group);
  if (!continues(parts)) begin(group);
  for (const Part& part : parts) step_->seen[part.parameter] = true;
  step_->unseen -= parts.size();
  step_->last = step_->last || last;
}

// ---- the state

uint64_t Compression::steps() {
  const std::lock_guard lock(mutex_);
  return steps_;
}

// Operations write to the state while they run.
void Compression::requireQuiet() {
  settleIfOver();
  if (step_ && step_->underWay() && step_.use_count() > 1)
    refuseGradients("its state cannot be changed while a backward is under way");
  step_ = nullptr;
  measured_.reset();
}

void Compression::setSteps(uint64_t steps) {
  const std::lock_guard lock(mutex_);
  requireQuiet();
  steps_ = steps;
  agreed_.reset();
}

bool Compression::readResidual(size_t parameter, float* to) {
  const std::lock_guard lock(mutex_);
  settleIfOver();
  return residuals_.read(parameter, to);
}

void Compression::writeResidual(size_t parameter, const float* from) {
  const std::lock_guard lock(mutex_);
  requireQuiet();
  residuals_.write(parameter, from);
}

void Compression::scaleResiduals(float factor) {
  const std::lock_guard lock(mutex_);
  requireQuiet();
  residuals_.scale(factor);
}

size_t Compression::residualBytes() {
  const std::lock_guard lock(mutex_);
  return residuals_.bytes();
}

std::string Compression::choice() {
  const std::lock_guard lock(mutex_);
  return tuner_ ? "measuring" : codes_ ? name(settings_.codec) : "exact";
}

std::string Compression::why() {
  const std::lock_guard lock(mutex_);
  return why_;
}

// ---- the operations that average one bucket: coded, exact, or exact with the residuals added

std::vector<Operation> Compression::average(const GradientBucket& bucket, Group& group) {
  size_t elements = 0;
  for (const Part& part : bucket.parts) {
    if (part.parameter >= parameters_.size() || parameters_[part.parameter].count != part.count)
      refuseGradients(
          "a bucket has a parameter that the state was not made for, or of another size");
    elements += part.count;
  }
  if (elements != bucket.count)
    refuseGradients("a bucket is not as large as its parameters together");

  const std::lock_guard lock(mutex_);
  enter(bucket.parts, bucket.last, group);

  std::vector<Part> coded, exact;
  for (const Part& part : bucket.parts) {
    const bool codes = canBeCoded(bucket.dtype) && !parameters_[part.parameter].exact;
    (codes ? coded : exact).push_back(part);
  }
  // In the order of parameters, which does not depend on the bucket.
  const auto by_number = [](const Part& a, const Part& b) { return a.parameter < b.parameter; };
  std::ranges::sort(coded, by_number);
  std::ranges::sort(exact, by_number);

  std::vector<Operation> operations;
  if (step_->mode == Mode::kExact && !settings_.automatic && group.size() > 2) {
    // In place, the order of addition would depend on the bucket.
    exact.insert(exact.end(), coded.begin(), coded.end());
    std::ranges::sort(exact, by_number);
    if (!exact.empty()) operations.push_back(exactPart(bucket, MessageLayout(exact, group.size())));
  } else if (step_->mode != Mode::kCoded) {
    operations.push_back(exactInPlace(bucket, MessageLayout(coded, group.size())));
  } else {
    if (!coded.empty()) operations.push_back(codedPart(bucket, MessageLayout(coded, group.size())));
    if (!exact.empty()) operations.push_back(exactPart(bucket, MessageLayout(exact, group.size())));
  }
  if (operations.empty())  // a bucket of no parameters
    operations.push_back({AllReduce{bucket.data, 0, bucket.dtype, ReduceOp::kAvg}});
  track(operations);
  return operations;
}

std::function<void(bool finite)> Compression::pass(const std::vector<Part>& parts, bool last,
                                                   Group& group) {
  const std::lock_guard lock(mutex_);
  enter(parts, last, group);
  ++step_->started;
  return [step = step_](bool finite) {
    if (!finite) step->finite = false;
    ++step->arrived;
  };
}

// Memory for the message of one operation at a time.
std::shared_ptr<std::vector<double>> Compression::messageOf(size_t bytes) {
  const size_t words = ceilDiv(bytes, sizeof(double));
  if (!message_ || message_->size() < words)
    message_ = std::make_shared<std::vector<double>>(words);
  return message_;
}

// The bucket as it is.  When coding ends, the residuals are added, so that nothing is lost.
Operation Compression::exactInPlace(const GradientBucket& bucket, const MessageLayout& layout) {
  Operation operation{AllReduce{.data = bucket.data,
                                .count = bucket.count,
                                .dtype = bucket.dtype,
                                .op = ReduceOp::kAvg,
                                .borders = MessageLayout(bucket.parts, 1).borders()}};
  if (step_->mode == Mode::kDraining && !layout.parts().empty()) {
    const auto store = residuals_.storeOf(layout);
    step_->stores.push_back(store);
    operation.before = [store, bucket] {
      addTo(bucket.data, bucket.dtype, store->layout, store->kept.data());
      std::fill(store->made.begin(), store->made.end(), 0.f);
    };
  }
  // Buckets without a residual too: a value that is not finite undoes the step.
  if (step_->mode == Mode::kDraining)
    operation.after = [step = step_, bucket] {
      if (!allFinite(bucket.data, bucket.dtype, bucket.count)) step->finite = false;
    };
  return operation;
}

Operation Compression::codedPart(const GradientBucket& bucket, const MessageLayout& layout) {
  const auto memory = messageOf(layout.count() * sizeof(float));
  float* message = reinterpret_cast<float*>(memory->data());
  const float* kept = nullptr;
  float* made = nullptr;
  std::shared_ptr<Residuals::Store> store;
  if (settings_.feedback) {
    store = residuals_.storeOf(layout);
    step_->stores.push_back(store);
    kept = store->kept.data();
    made = store->made.data();
  }
  // Random numbers that no other bucket or step has, and the same on all ranks.
  const uint64_t seed =
      mixedSeed(mixedSeed(settings_.seed, step_->number), layout.parts()[0].parameter);
  Operation operation{CompressedAllReduce{.input = message,
                                          .output = message,
                                          .count = layout.count(),
                                          .coding = {settings_.codec, settings_.stochastic, seed},
                                          .op = ReduceOp::kAvg,
                                          .schedule = settings_.schedule,
                                          .error = made,
                                          .chosen_for = usual_,
                                          .borders = layout.borders()}};
  // A parameter without a gradient here keeps its residual for a step with one: if no rank has a
  // gradient, DDP treats the parameter as unused and discards the average.
  const auto absent = std::make_shared<std::vector<size_t>>();
  operation.before = [=] {
    if (kept) *absent = partsOfZeros(layout, bucket.data, bucket.dtype);
    gather(message, layout, bucket.data, bucket.dtype, kept);
    for (const size_t i : *absent) clearPart(message, layout, i);
  };
  operation.after = [=, step = step_] {
    if (!scatter(bucket.data, bucket.dtype, layout, message)) step->finite = false;
    for (const size_t i : *absent) addPart(made, layout, i, kept);
    (void)memory, (void)store;  // keeps them alive
  };
  return operation;
}

Operation Compression::exactPart(const GradientBucket& bucket, const MessageLayout& layout) {
  const auto memory = messageOf(layout.count() * sizeOf(bucket.dtype));
  auto* message = reinterpret_cast<std::byte*>(memory->data());
  Operation operation{AllReduce{.data = message,
                                .count = layout.count(),
                                .dtype = bucket.dtype,
                                .op = ReduceOp::kAvg,
                                .borders = layout.borders()}};
  operation.before = [=] { gatherExact(message, layout, bucket.data, bucket.dtype); };
  operation.after = [=, step = step_] {
    if (!scatterExact(bucket.data, bucket.dtype, layout, message)) step->finite = false;
    (void)memory;
  };
  return operation;
}

// Notes when the bucket has arrived, and how long its operations took.
void Compression::track(std::vector<Operation>& operations) const {
  ++step_->started;
  const auto begun = std::make_shared<Nanos>();
  operations.front().before = [first = std::move(operations.front().before), begun] {
    *begun = monotonicNow();
    if (first) first();
  };
  operations.back().after = [last = std::move(operations.back().after), begun, step = step_] {
    if (last) last();
    step->busy += monotonicNow() - *begun;
    ++step->arrived;
  };
}

}  // namespace ringreduce
