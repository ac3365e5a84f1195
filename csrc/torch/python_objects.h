// Python objects that C++ threads hold, and Futures that they complete.  For bindings only.
#pragma once

#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>

namespace ringreduce {

// An object whose last holder may be a thread without the interpreter's lock.
inline std::shared_ptr<pybind11::object> shared(const pybind11::object& object) {
  return {new pybind11::object(object), [](pybind11::object* o) {
            if (!Py_IsInitialized()) return;  // the interpreter took it along
            const pybind11::gil_scoped_acquire gil;
            delete o;
          }};
}

// Starts what `start` returns a Future of, without the interpreter's lock, and completes `future`,
// a torch.futures.Future, with its tensor.  DDP wants a Python object from a hook in Python;
// Future.then would make one, but turns our errors into RuntimeError.
template <class Start>
void completes(const pybind11::object& future, Start start) {
  const auto wrapped = future.cast<std::shared_ptr<torch::jit::PythonFutureWrapper>>();
  const auto object = shared(future);
  const pybind11::gil_scoped_release no_gil;
  start()->addCallback([wrapped, object](c10::ivalue::Future& done) {
    if (done.hasError()) return wrapped->fut->setError(done.exception_ptr());
    const pybind11::gil_scoped_acquire gil;
    object->attr("set_result")(done.constValue().toTensor());
  });
}

}  // namespace ringreduce
