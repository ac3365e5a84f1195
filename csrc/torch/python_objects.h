// Python objects that C++ threads hold, and Futures that Python receives.  For bindings only.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

namespace ringreduce {

// An object whose last holder may be a thread without the interpreter's lock.
inline std::shared_ptr<pybind11::object> shared(const pybind11::object& object) {
  return {new pybind11::object(object), [](pybind11::object* o) {
            if (!Py_IsInitialized()) return;  // the interpreter took it along
            const pybind11::gil_scoped_acquire gil;
            delete o;
          }};
}

// A tensor as the Python object that DDP expects in the Future of a hook written in Python.  torch
// has such a holder for any object, in a header of its compiler that takes 15 s to compile.
class HeldTensor final : public c10::ivalue::PyObjectHolder {
 public:
  // With the interpreter's lock.
  explicit HeldTensor(const at::Tensor& tensor)
      : tensor_(tensor),
        object_(shared(pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(tensor)))) {}
  PyObject* getPyObject() override { return object_->ptr(); }
  c10::InferredType tryToInferType() override { return c10::InferredType(c10::TensorType::get()); }
  c10::IValue toIValue(const c10::TypePtr&, std::optional<int32_t>) override { return tensor_; }
  std::string toStr() override { return tensor_.toString(); }
  std::vector<at::Tensor> extractTensors() override { return {tensor_}; }

 private:
  const at::Tensor tensor_;
  const std::shared_ptr<pybind11::object> object_;
};

// The result of a hook called from Python: its get_future() is a Future with the bucket's tensor.
// It is a Work because torch's own binding of Work.get_future needs no header of torch's compiler
// here.  Future.then would make such a Future too, but turns our errors into RuntimeError.
class HookWork final : public c10d::Work {
 public:
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
  explicit HookWork(const FuturePtr& average)
      : future_(c10::make_intrusive<c10::ivalue::Future>(c10::PyObjectType::get(),
                                                         average->devices())) {
    average->addCallback([future = future_](c10::ivalue::Future& done) {
      if (done.hasError()) return future->setError(done.exception_ptr());
      const pybind11::gil_scoped_acquire gil;
      future->markCompleted(c10::IValue(c10::intrusive_ptr<c10::ivalue::PyObjectHolder>(
          c10::make_intrusive<HeldTensor>(done.constValue().toTensor()))));
    });
  }
  FuturePtr getFuture() override { return future_; }
  bool isCompleted() override { return future_->completed(); }
  bool wait(std::chrono::milliseconds) override {
    future_->waitAndThrow();
    return true;
  }

 private:
  const FuturePtr future_;
};

}  // namespace ringreduce
