// The operations that average one bucket: coded, exact, or exact with what was held back.
#include <algorithm>
#include <utility>

#include "base/align.h"
#include "group/compression_step.h"
#include "kernels/message.h"

namespace ringreduce {
namespace {

bool canBeCoded(DType dtype) {
  return dtype == DType::kFloat32 || isHalf(dtype);
}

}  // namespace

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
  agreeLocked(group);
  if (!continues(bucket)) begin(group);
  for (const Part& part : bucket.parts) step_->seen[part.parameter] = true;
  step_->unseen -= bucket.parts.size();
  step_->last = step_->last || bucket.last;

  std::vector<Part> coded, exact;
  for (const Part& part : bucket.parts) {
    const bool codes = canBeCoded(bucket.dtype) && !parameters_[part.parameter].exact;
    (codes ? coded : exact).push_back(part);
  }
  // In the order of parameters, whatever that in the bucket is.
  const auto by_number = [](const Part& a, const Part& b) { return a.parameter < b.parameter; };
  std::sort(coded.begin(), coded.end(), by_number);
  std::sort(exact.begin(), exact.end(), by_number);

  std::vector<Operation> operations;
  if (step_->way == Way::kExact && !settings_.automatic && group.size() > 2) {
    // In place the order of addition would depend on the bucket.
    exact.insert(exact.end(), coded.begin(), coded.end());
    std::sort(exact.begin(), exact.end(), by_number);
    if (!exact.empty()) operations.push_back(exactPart(bucket, MessageLayout(exact, group.size())));
  } else if (step_->way != Way::kCoded) {
    operations.push_back(exactInPlace(bucket, MessageLayout(coded, group.size())));
  } else {
    if (!coded.empty()) operations.push_back(codedPart(bucket, MessageLayout(coded, group.size())));
    if (!exact.empty()) operations.push_back(exactPart(bucket, MessageLayout(exact, group.size())));
  }
  if (operations.empty())  // a bucket of no parameters
    operations.push_back({AllReduce{bucket.data, 0, bucket.dtype, ReduceOp::kAvg}});
  watch(operations);
  return operations;
}

// Memory for the message of one operation at a time.
std::shared_ptr<std::vector<double>> Compression::messageOf(size_t bytes) {
  const size_t words = ceilDiv(bytes, sizeof(double));
  if (!message_ || message_->size() < words)
    message_ = std::make_shared<std::vector<double>>(words);
  return message_;
}

// The bucket as it is; or, where coding ends, with the residuals, so that nothing is lost.
Operation Compression::exactInPlace(const GradientBucket& bucket, const MessageLayout& layout) {
  Operation operation{AllReduce{bucket.data, bucket.count, bucket.dtype, ReduceOp::kAvg}};
  if (step_->way == Way::kDraining && !layout.parts().empty()) {
    const auto store = residuals_.storeOf(layout);
    step_->stores.push_back(store);
    operation.before = [store, bucket] {
      addTo(bucket.data, bucket.dtype, store->layout, store->kept.data());
      std::fill(store->made.begin(), store->made.end(), 0.f);
    };
  }
  // The buckets without a residual too: whatever is not finite undoes the step.
  if (step_->way == Way::kDraining)
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
                                          .chosen_for = usual_}};
  // A parameter without a gradient here keeps its residual for a step that has one: where no rank
  // has one, DDP takes it as unused, and throws away what comes.
  const auto absent = std::make_shared<std::vector<size_t>>();
  operation.before = [=] {
    if (kept) *absent = partsOfZeros(layout, bucket.data, bucket.dtype);
    gather(message, layout, bucket.data, bucket.dtype, kept);
    for (const size_t i : *absent) clearPart(message, layout, i);
  };
  operation.after = [=, step = step_] {
    if (!scatter(bucket.data, bucket.dtype, layout, message)) step->finite = false;
    for (const size_t i : *absent) addPart(made, layout, i, kept);
    (void)memory, (void)store;  // live until then
  };
  return operation;
}

Operation Compression::exactPart(const GradientBucket& bucket, const MessageLayout& layout) {
  const auto memory = messageOf(layout.count() * sizeOf(bucket.dtype));
  auto* message = reinterpret_cast<std::byte*>(memory->data());
  Operation operation{AllReduce{message, layout.count(), bucket.dtype, ReduceOp::kAvg}};
  operation.before = [=] { gatherExact(message, layout, bucket.data, bucket.dtype); };
  operation.after = [=, step = step_] {
    if (!scatterExact(bucket.data, bucket.dtype, layout, message)) step->finite = false;
    (void)memory;
  };
  return operation;
}

// Notes when the bucket has arrived, and how long its operations took.
void Compression::watch(std::vector<Operation>& operations) const {
  ++step_->started;
  const auto begun = std::make_shared<Nanos>();
  operations.front().before = [first = std::move(operations.front().before), begun] {
    *begun = now();
    if (first) first();
  };
  operations.back().after = [last = std::move(operations.back().after), begun, step = step_] {
    if (last) last();
    step->busy += now() - *begun;
    ++step->arrived;
  };
}

}  // namespace ringreduce
