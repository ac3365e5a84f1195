// ringreduce._C: what Python sees of the extension.  Its stubs are ringreduce/_C.pyi.
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "base/env.h"
#include "reduce/reduce.h"
#include "torch/backend.h"
#include "torch/comm_hook.h"
#include "torch/errors.h"
#include "torch/memory.h"

namespace py = pybind11;

namespace ringreduce {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// Seconds as nanoseconds; more than the clock can count means never.
Nanos nanosOf(double seconds) {
  return seconds * kSecond < static_cast<double>(kNever) ? static_cast<Nanos>(seconds * kSecond)
                                                         : kNever;
}

// What is not given comes from the environment.
BackendPtr createBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                         double timeout, const std::string& name,
                         const std::vector<int>& global_ranks,
                         const std::optional<std::string>& algorithm,
                         std::optional<size_t> slot_bytes, std::optional<int> slots,
                         std::optional<double> stall_seconds) {
  const py::gil_scoped_release no_gil;  // ranks that are threads of one process join one another
  try {
    GroupOptions options;
    options.name = name;
    options.global_ranks = global_ranks;
    options.timeout = nanosOf(timeout);
    options.interrupt = &checkSignals;
    options.interrupted = &interruptedSince;
    options.stall =
        nanosOf(stall_seconds.value_or(envSeconds("RINGREDUCE_STALL_SECONDS", 10, 0.01, 1e9)));
    // Given by the caller: rank 0 refuses for all what it cannot work with.  The environment is
    // read by rank 0 alone, inside.
    if (rank == 0 && (algorithm || slot_bytes || slots)) {
      options.shared = SharedOptions::fromEnvironment(size);
      if (algorithm) options.shared->algorithm = algorithmNamed(*algorithm).value_or(kNoAlgorithm);
      options.shared->slot_bytes = slot_bytes.value_or(options.shared->slot_bytes);
      options.shared->slots = slots.value_or(options.shared->slots);
    }
    return c10::make_intrusive<Backend>(store, rank, size, options);
  } catch (const Error&) {
    rethrowToPython();
  }
}

// Averages a bucket and completes `future`, a torch.futures.Future, with its tensor.  DDP wants a
// Python object from a hook in Python; Future.then would make one, but turns our errors into
// RuntimeError.
void averageBucket(const BackendPtr& backend, c10d::GradBucket& bucket, const py::object& future) {
  const auto wrapped = future.cast<std::shared_ptr<torch::jit::PythonFutureWrapper>>();
  // The last to hold it may be a thread without the interpreter's lock.
  const std::shared_ptr<py::object> object(new py::object(future), [](py::object* o) {
    const py::gil_scoped_acquire gil;
    delete o;
  });
  const py::gil_scoped_release no_gil;
  averageGradBucket(*backend, bucket)->addCallback([wrapped, object](c10::ivalue::Future& done) {
    if (done.hasError()) return wrapped->fut->setError(done.exception_ptr());
    const py::gil_scoped_acquire gil;
    object->attr("set_result")(done.constValue().toTensor());
  });
}

}  // namespace
}  // namespace ringreduce

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace ringreduce;
  py::module_::import("torch.distributed");  // registers the types that the signatures name
  watchInterrupts();
  // What Backend.mem_allocator returns: torch's CPU builds have no class for allocators.
  py::class_<PageAllocator, std::shared_ptr<PageAllocator>>(m, "PageAllocator");

  m.def("create_backend", &createBackend, py::arg("store"), py::arg("rank"), py::arg("size"),
        py::arg("timeout"), py::arg("name"), py::arg("global_ranks"),
        py::arg("algorithm") = py::none(), py::arg("slot_bytes") = py::none(),
        py::arg("slots") = py::none(), py::arg("stall_seconds") = py::none());
  m.def("shutdown_all", &Backend::shutdownAll, py::call_guard<py::gil_scoped_release>());
  m.def(
      "staging_bytes",
      [](const BackendPtr& backend) { return asRingreduce(*backend).stagingBytes(); },
      py::arg("backend"));
  m.def(
      "has_failed", [](const BackendPtr& backend) { return asRingreduce(*backend).hasFailed(); },
      py::arg("backend"));
  m.def("register_comm_hook", &registerCommHook, py::arg("reducer"), py::arg("backend"));
  m.def("average_bucket", &averageBucket, py::arg("backend"), py::arg("bucket"), py::arg("future"));
  m.def("instruction_set", &instructionSet);
  m.def(
      "set_error_types",
      [](const py::object& peer_lost, const py::object& timeout, const py::object& mismatch,
         const py::object& aborted, const py::object& other) {
        setErrorTypes(peer_lost.ptr(), timeout.ptr(), mismatch.ptr(), aborted.ptr(), other.ptr());
      },
      py::arg("peer_lost"), py::arg("timeout"), py::arg("mismatch"), py::arg("aborted"),
      py::arg("other"));
}
