// Compressed all-reduces and the compressing hook, as Python sees them.
#include "torch/compression_bindings.h"

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "torch/backend.h"
#include "torch/compressed_hook.h"
#include "torch/errors.h"
#include "torch/python_objects.h"

namespace py = pybind11;

namespace ringreduce {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// What `find` finds by a name, or ValueError.
template <class Find>
auto named(Find find, const std::string& given, const char* what, const char* known) {
  const auto found = find(given);
  if (!found)
    throw py::value_error("ringreduce has no " + std::string(what) + " \"" + given + "\", but " +
                          known);
  return *found;
}
Codec codecOf(const std::string& given) {
  return named(codecNamed, given, "codec", "bfloat16, float16, int8 and int4");
}
CodedSchedule scheduleOf(const std::string& given) {
  return named(codedScheduleNamed, given, "schedule of compressed all-reduces",
               "auto, owner and ring");
}
ReduceOp sumOrAverage(const std::string& given) {
  if (given == "sum") return ReduceOp::kSum;
  if (given == "avg") return ReduceOp::kAvg;
  throw py::value_error("a compressed all_reduce has op \"sum\" or \"avg\", not \"" + given + "\"");
}

BackendPtr::element_type& checked(const BackendPtr& backend) {
  if (!backend) throw py::value_error("a ringreduce group is needed");
  return *backend;
}

c10::intrusive_ptr<c10d::Work> startCompressed(const BackendPtr& backend, const at::Tensor& input,
                                               const at::Tensor& output, const std::string& codec,
                                               const std::string& op, const std::string& schedule,
                                               bool stochastic, uint64_t seed,
                                               const std::optional<at::Tensor>& error, bool async) {
  const Coding coding{codecOf(codec), stochastic, seed};
  const ReduceOp how = sumOrAverage(op);
  const CodedSchedule who = scheduleOf(schedule);
  const py::gil_scoped_release no_gil;
  return asRingreduce(checked(backend))
      .compressedAllReduce(input, output, error, coding, how, who, async);
}

std::shared_ptr<HookState> makeState(const std::vector<at::Tensor>& parameters,
                                     const std::vector<bool>& exact,
                                     const std::vector<uint64_t>& names, const std::string& codec,
                                     bool feedback, uint64_t start_after,
                                     const std::string& schedule, bool stochastic, uint64_t seed) {
  CompressionSettings settings{.feedback = feedback,
                               .start_after = start_after,
                               .schedule = scheduleOf(schedule),
                               .stochastic = stochastic,
                               .seed = seed};
  settings.automatic = codec == "auto";
  if (!settings.automatic) settings.codec = codecOf(codec);
  return std::make_shared<HookState>(settings, parameters, exact, names);
}

std::optional<at::Tensor> readResidual(HookState& state, size_t parameter) {
  return translated([&]() -> std::optional<at::Tensor> {
    at::Tensor values =
        at::zeros({static_cast<int64_t>(state.core().count(parameter))}, at::kFloat);
    if (!state.core().readResidual(parameter, values.data_ptr<float>())) return std::nullopt;
    return values;
  });
}

void writeResidual(HookState& state, size_t parameter, const std::optional<at::Tensor>& values) {
  translated([&] {
    if (!values) return state.core().writeResidual(parameter, nullptr);
    TORCH_CHECK(static_cast<size_t>(values->numel()) == state.core().count(parameter),
                "a residual has as many elements as its parameter");
    const at::Tensor floats = values->to(at::kCPU, at::kFloat).contiguous();
    state.core().writeResidual(parameter, floats.const_data_ptr<float>());
  });
}

}  // namespace

void bindCompression(py::module_& m) {
  m.def("compressed_all_reduce", &startCompressed, py::arg("backend"), py::arg("input"),
        py::arg("output"), py::kw_only(), py::arg("codec"), py::arg("op") = "sum",
        py::arg("schedule") = "auto", py::arg("stochastic") = false, py::arg("seed") = 0,
        py::arg("error") = py::none(), py::arg("async_op") = true);

  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<HookState, std::shared_ptr<HookState>>(m, "HookState")
      .def(py::init(&makeState), py::arg("parameters"), py::arg("exact"), py::arg("names"),
           py::arg("codec"), py::arg("feedback"), py::arg("start_after"), py::arg("schedule"),
           py::arg("stochastic"), py::arg("seed"))
      .def(
          "agree",
          [](HookState& state, const BackendPtr& backend) {
            translated([&] { state.core().agree(*asRingreduce(checked(backend)).group()); });
          },
          no_gil, py::arg("backend"))
      .def(
          "register",
          [](const std::shared_ptr<HookState>& state, c10d::Reducer& reducer,
             const BackendPtr& backend) {
            checked(backend);
            registerCompressedHook(reducer, backend, state);
          },
          py::arg("reducer"), py::arg("backend"))
      .def(
          "average_bucket",
          [](const std::shared_ptr<HookState>& state, const BackendPtr& backend,
             c10d::GradBucket& bucket) -> c10::intrusive_ptr<c10d::Work> {
            return c10::make_intrusive<HookWork>(state->average(checked(backend), bucket));
          },
          no_gil, py::arg("backend"), py::arg("bucket"))
      .def("residual", &readResidual, no_gil, py::arg("parameter"))
      .def("set_residual", &writeResidual, no_gil, py::arg("parameter"), py::arg("values"))
      .def(
          "scale_residuals",
          [](HookState& state, float factor) {
            translated([&] { state.core().scaleResiduals(factor); });
          },
          no_gil, py::arg("factor"))
      .def(
          "residual_bytes", [](HookState& state) { return state.core().residualBytes(); }, no_gil)
      .def(
          "steps", [](HookState& state) { return state.core().steps(); }, no_gil)
      .def(
          "set_steps",
          [](HookState& state, uint64_t steps) {
            translated([&] { state.core().setSteps(steps); });
          },
          no_gil, py::arg("steps"))
      .def(
          "choice", [](HookState& state) { return state.core().choice(); }, no_gil)
      .def("why", [](HookState& state) { return state.core().why(); }, no_gil);
}

}  // namespace ringreduce
