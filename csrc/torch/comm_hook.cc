// The hook, and what names a bucket in an error.
#include "torch/comm_hook.h"

#include <memory>
#include <string>
#include <utility>

#include "torch/backend.h"

namespace ringreduce {
namespace {

// "DDP bucket 2 with 3 parameters of shapes [4096, 64], [4096], ..."
std::string describe(size_t index, const std::vector<at::Tensor>& parameters) {
  constexpr size_t kMostShapes = 3;
  std::string text = c10::str("DDP bucket ", index, " with ", parameters.size(),
                              parameters.size() == 1 ? " parameter" : " parameters", " of shape");
  for (size_t i = 0; i < parameters.size() && i < kMostShapes; ++i)
    text += c10::str(i ? ", " : " ", parameters[i].sizes());
  return parameters.size() > kMostShapes ? text + ", ..." : text;
}

class AverageHook final : public c10d::CppCommHookInterface<c10::intrusive_ptr<c10d::Backend>> {
 public:
  using CppCommHookInterface::CppCommHookInterface;

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    return averageGradBucket(*state_, bucket);
  }
};

}  // namespace

c10::intrusive_ptr<c10::ivalue::Future> averageGradBucket(c10d::Backend& backend,
                                                          c10d::GradBucket& bucket) {
  return asRingreduce(backend).averageBucket(
      bucket.getBufferRef(), [index = bucket.getIndex(), parameters = bucket.getParameters()] {
        return describe(index, parameters);
      });
}

void registerCommHook(c10d::Reducer& reducer, c10::intrusive_ptr<c10d::Backend> backend) {
  asRingreduce(*backend);
  reducer.register_comm_hook(std::make_unique<AverageHook>(std::move(backend)));
}

}  // namespace ringreduce
