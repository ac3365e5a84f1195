// Both DDP hooks, and the text that names a bucket in an error.
#include "torch/comm_hook.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "torch/backend.h"
#include "torch/errors.h"

namespace ringreduce {
namespace {

// The name of a bucket in an error.  It holds no tensors: the thread that drops the last reference
// may hold a lock, and the last reference to a parameter needs the interpreter's lock.
struct Description {
  static constexpr size_t kMostShapes = 3;
  size_t index, parameters;
  std::vector<std::vector<int64_t>> shapes;  // of the first parameters

  explicit Description(c10d::GradBucket& bucket) : index(bucket.getIndex()) {
    const std::vector<at::Tensor>& all = bucket.getParameters();
    parameters = all.size();
    for (size_t i = 0; i < parameters && i < kMostShapes; ++i)
      shapes.push_back(all[i].sizes().vec());
  }

  // "DDP bucket 2 with 4 parameters of shape [4096, 64], [4096], [64], ..."
  std::string text() const {
    std::string text = c10::str("DDP bucket ", index, " with ", parameters,
                                parameters == 1 ? " parameter" : " parameters", " of shape");
    for (size_t i = 0; i < shapes.size(); ++i)
      text += c10::str(i ? ", " : " ", c10::IntArrayRef(shapes[i]));
    return parameters > shapes.size() ? text + ", ..." : text;
  }
};

// Numbers that a bucket has of it: DDP takes a complex one for two.
size_t numbersOf(const at::Tensor& parameter) {
  return static_cast<size_t>(parameter.numel()) * (parameter.is_complex() ? 2 : 1);
}

Context describeBucket(c10d::GradBucket& bucket) {
  return [description = Description(bucket)] { return description.text(); };
}

// Calls torch's hooks around the start of an average, as torch does around its own collectives.
template <class Average>
c10::intrusive_ptr<c10::ivalue::Future> hooked([[maybe_unused]] c10d::ProcessGroup& group,
                                               [[maybe_unused]] const at::Tensor& bucket,
                                               Average&& average) {
#ifdef C10D_BACKEND_HAS_HOOKS
  constexpr auto kName = c10d::HookOpName::ALLREDUCE;
  const int64_t id = group.firePreHook(kName, /*async_op=*/true, /*root=*/-1, std::vector{bucket});
  const BucketAverage started = average();
  group.firePostHook(kName, /*async_op=*/true, id, started.work);
  return started.future;
#else
  return average().future;
#endif
}

struct Averaging {
  AveragingGroup group;
  std::shared_ptr<HookState> state;  // null: exact
};

class Hook final : public c10d::CppCommHookInterface<Averaging> {
 public:
  using CppCommHookInterface::CppCommHookInterface;

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    return state_.state ? state_.state->average(state_.group, bucket)
                        : averageGradBucket(state_.group, bucket);
  }
};

}  // namespace

c10::intrusive_ptr<c10::ivalue::Future> averageGradBucket(const AveragingGroup& group,
                                                          c10d::GradBucket& bucket) {
  std::vector<size_t> sizes;
  for (const at::Tensor& parameter : bucket.getParameters()) sizes.push_back(numbersOf(parameter));
  return hooked(*group.group, bucket.getBufferRef(), [&] {
    return asRingreduce(*group.backend)
        .averageBucket(bucket.getBufferRef(), bordersOf(sizes), describeBucket(bucket));
  });
}

void registerCommHook(c10d::Reducer& reducer, AveragingGroup group,
                      std::shared_ptr<HookState> state) {
  asRingreduce(*group.backend);
  reducer.register_comm_hook(std::make_unique<Hook>(Averaging{std::move(group), std::move(state)}));
}

// ---- compressed gradients

namespace {

std::vector<CompressedParameter> described(const std::vector<at::Tensor>& parameters,
                                           const std::vector<bool>& exact,
                                           const std::vector<uint64_t>& names) {
  TORCH_CHECK(parameters.size() == exact.size() && parameters.size() == names.size(),
              "as many parameters, choices and names are needed");
  std::vector<CompressedParameter> all;
  for (size_t i = 0; i < parameters.size(); ++i)
    all.push_back({numbersOf(parameters[i]), exact[i], names[i]});
  return all;
}

}  // namespace

HookState::HookState(const CompressionSettings& settings, const std::vector<at::Tensor>& parameters,
                     const std::vector<bool>& exact, const std::vector<uint64_t>& names)
    : core_(settings, described(parameters, exact, names)) {
  for (size_t i = 0; i < parameters.size(); ++i)
    numbers_.emplace(parameters[i].unsafeGetTensorImpl(), i);
}

c10::intrusive_ptr<c10::ivalue::Future> HookState::average(const AveragingGroup& group,
                                                           c10d::GradBucket& bucket) {
  return translated([&] {
    std::vector<Part> parts;
    size_t begin = 0;
    for (const at::Tensor& parameter : bucket.getParameters()) {
      const auto found = numbers_.find(parameter.unsafeGetTensorImpl());
      if (found == numbers_.end())
        throw Error(Failure::kArgument,
                    "ringreduce compressed gradients: " + describeBucket(bucket)() +
                        " has a parameter that the CompressionState does not know; make the state "
                        "of the model that DDP has");
      const size_t count = numbersOf(parameter);
      parts.push_back({found->second, begin, count});
      begin += count;
    }
    // A sparse gradient travels exactly.  The step's residuals wait for it too.
    if (bucket.getBufferRef().is_sparse()) {
      const auto arrived =
          core_.pass(parts, bucket.isLast(), *asRingreduce(*group.backend).group());
      return averageGradBucket(group, bucket)
          ->then(
              [arrived](c10::ivalue::Future& done) {
                const at::Tensor average = done.value().toTensor();
                arrived(average._values().isfinite().all().item<bool>());
                return average;
              },
              c10::TensorType::get());
    }
    return hooked(*group.group, bucket.getBufferRef(), [&] {
      return asRingreduce(*group.backend)
          .averageBucket(bucket.getBufferRef(), core_, std::move(parts), bucket.isLast(),
                         describeBucket(bucket));
    });
  });
}

}  // namespace ringreduce
