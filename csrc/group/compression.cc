// What ranks agree on, steps, and the state.  The operations of a bucket are in
// compression_bucket.cc.

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/hash.h"
#include "base/log.h"
#include "group/compression_step.h"

namespace ringreduce {

Compression::Compression(const CompressionSettings& settings,
                         std::vector<CompressedParameter> parameters)
    : settings_(settings), parameters_(std::move(parameters)), residuals_([this] {
        std::vector<size_t> counts;
        for (const CompressedParameter& parameter : parameters_) counts.push_back(parameter.count);
        return counts;
      }()) {
  // No bucket's own size: which schedule it takes decides about bits.
  constexpr size_t kBucket = (25 << 20) / sizeof(float);  // DDP's, unless it is told otherwise
  for (const CompressedParameter& parameter : parameters_)
    if (!parameter.exact) usual_ += parameter.count;
  usual_ = std::min(usual_, kBucket);
  if (settings_.automatic) startTrial();
}

Compression::~Compression() = default;

// ---- agreeing

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

  std::vector<uint64_t> all(static_cast<size_t>(group.size()));
  AllGather gather{.input = &own, .dtype = DType::kInt64};
  for (uint64_t& one : all) {
    gather.outputs.push_back(&one);
    gather.counts.push_back(1);
  }
  group.run({gather});
  // The most frequent is right, and of two as frequent the one of the lowest rank.
  const auto frequency = [&](uint64_t value) { return std::count(all.begin(), all.end(), value); };
  const uint64_t right = *std::max_element(
      all.begin(), all.end(), [&](uint64_t a, uint64_t b) { return frequency(a) < frequency(b); });
  std::string odd;
  for (size_t r = 0; r < all.size(); ++r)
    if (all[r] != right) odd += (odd.empty() ? "" : ", ") + group.who(static_cast<int>(r));
  if (!odd.empty())
    throw Error(Failure::kMismatch, "compressed gradients: " + odd +
                                        " has another codec, error_feedback, schedule, stochastic, "
                                        "seed, start_after, choice of "
                                        "exact parameters, number of steps so far or model than "
                                        "the other ranks; give all ranks "
                                        "the same");
  agreed_ = group.weak_from_this();
  message_ = nullptr;  // another group's operations may still use it
  // Nor is the rest of a step, or of a trial, the same on ranks that were elsewhere before.
  settleIfOver();
  step_ = nullptr;
  measured_.reset();
  if (settings_.automatic) startTrial();
}

void Compression::startTrial() {
  trial_.emplace();
  codes_ = true;
  why_ = "not known yet";
}

// ---- steps

void Compression::begin(Group& group) {
  const Nanos ended = now();
  settle();
  if (trial_ && measured_ && group.size() > 1) {
    trial_->record(
        {measured_->operations, static_cast<double>(ended - measured_->began) / kSecond});
    closeTrial(group);
  }
  measured_.reset();
  const Way way = wayOf(steps_, group);
  step_ = std::make_shared<Step>(steps_++, way, parameters_.size());
}

// What the latest step has made of the residuals holds from now on, if all went well.
void Compression::settle() {
  if (!step_) return;
  const auto step = std::exchange(step_, nullptr);
  if (!step->complete() || step->underWay()) return;
  if (trial_ && tries(step->number))
    measured_ = {step->began, static_cast<double>(step->busy) / kSecond};
  if (!step->finite) return;
  for (const auto& store : step->stores) store->kept.swap(store->made);
  if (step->way == Way::kDraining) residuals_.clear();
}

void Compression::settleIfOver() {
  if (step_ && step_->complete() && !step_->underWay()) settle();
}

bool Compression::tries(uint64_t step) const {
  return trial_ && step >= settings_.start_after;
}

Compression::Way Compression::wayOf(uint64_t step, Group& group) const {
  if (step < settings_.start_after) return Way::kExact;
  const Way exact = residuals_.empty() ? Way::kExact : Way::kDraining;
  if (group.size() == 1) return exact;
  if (trial_) return trial_->next() == Trial::Way::kCoded ? Way::kCoded : Way::kExact;
  return codes_ ? Way::kCoded : exact;
}

// Everybody's numbers give everybody the same answer.
void Compression::closeTrial(Group& group) {
  if (!trial_->hasPair()) return;
  Trial::Numbers numbers = trial_->numbers();
  group.run({AllReduce{numbers.data(), numbers.size(), DType::kFloat64, ReduceOp::kAvg}});
  const std::optional<bool> decision = trial_->decide(numbers, why_);
  if (!decision) return;
  codes_ = *decision;
  trial_.reset();
  if (group.rank() == 0 && logsInfo())
    log("gradients travel " + (codes_ ? std::string("as ") + name(settings_.codec) : "exactly") +
        " from now on: " + why_);
}

// Whether the bucket is of the step that is under way.
bool Compression::continues(const GradientBucket& bucket) const {
  return step_ && !step_->complete() &&
         std::none_of(bucket.parts.begin(), bucket.parts.end(),
                      [&](const Part& part) { return step_->seen[part.parameter]; });
}

// ---- the state

uint64_t Compression::steps() {
  const std::lock_guard lock(mutex_);
  return steps_;
}

// Nobody is to write where operations do.
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
  return trial_ ? "measuring" : codes_ ? name(settings_.codec) : "exact";
}

std::string Compression::why() {
  const std::lock_guard lock(mutex_);
  return why_;
}

}  // namespace ringreduce
