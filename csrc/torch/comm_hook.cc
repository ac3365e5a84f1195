// The hook, and what names a bucket in an error.
#include "torch/comm_hook.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "torch/backend.h"

namespace ringreduce {
namespace {

// What an error says of a bucket.  It holds no tensors: whoever lets go of it last may hold a lock,
// and the last reference to a parameter needs the interpreter's.
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

class AverageHook final : public c10d::CppCommHookInterface<c10::intrusive_ptr<c10d::Backend>> {
 public:
  using CppCommHookInterface::CppCommHookInterface;

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    return averageGradBucket(*state_, bucket);
  }
};

}  // namespace

Context describeBucket(c10d::GradBucket& bucket) {
  return [description = Description(bucket)] { return description.text(); };
}

c10::intrusive_ptr<c10::ivalue::Future> averageGradBucket(c10d::Backend& backend,
                                                          c10d::GradBucket& bucket) {
  return asRingreduce(backend).averageBucket(bucket.getBufferRef(), describeBucket(bucket));
}

void registerCommHook(c10d::Reducer& reducer, c10::intrusive_ptr<c10d::Backend> backend) {
  asRingreduce(*backend);
  reducer.register_comm_hook(std::make_unique<AverageHook>(std::move(backend)));
}

}  // namespace ringreduce
