// ringreduce._C, the extension's Python module.  Its stubs are ringreduce/_C.pyi.
#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "algorithm/choose.h"
#include "base/config.h"
#include "bootstrap/attempt.h"
#include "bootstrap/topology.h"
#include "epoch/network.h"
#include "epoch/wires.h"
#include "kernels/codec.h"
#include "kernels/reduce.h"
#include "kernels/sparse_codec.h"
#include "torch/arguments.h"
#include "torch/backend.h"
#include "torch/comm_hook.h"
#include "torch/errors.h"
#include "torch/live_groups.h"
#include "torch/page_memory.h"
#include "torch/store_keeper.h"
#include "transport/tcp/acceptor.h"
#include "transport/tcp/address.h"

namespace py = pybind11;
using namespace pybind11::literals;

namespace ringreduce {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

// ---- Python objects that C++ threads hold, and Futures that Python receives

// An object whose last holder may be a thread without the interpreter's lock.
std::shared_ptr<py::object> shared(const py::object& object) {
  return {new py::object(object), [](py::object* o) {
            if (!Py_IsInitialized()) return;  // the interpreter took it along
            const py::gil_scoped_acquire gil;
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
        object_(shared(py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor)))) {}
  PyObject* getPyObject() override { return object_->ptr(); }
  c10::InferredType tryToInferType() override { return c10::InferredType(c10::TensorType::get()); }
  c10::IValue toIValue(const c10::TypePtr&, std::optional<int32_t>) override { return tensor_; }
  std::string toStr() override { return tensor_.toString(); }
  std::vector<at::Tensor> extractTensors() override { return {tensor_}; }

 private:
  const at::Tensor tensor_;
  const std::shared_ptr<py::object> object_;
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
      const py::gil_scoped_acquire gil;
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

// ---- groups

// Read before the other ranks can be told, so the error says whose it is.
double stallSeconds(const std::string& rank) {
  try {
    return Config::read().stall_seconds.get();
  } catch (const Error& error) {
    throw Error(error.kind(),
                "rank " + rank + " (pid " + std::to_string(getpid()) + "): " + error.what());
  }
}

void bindSettings(py::module_& m) {
  py::class_<Settings, c10::intrusive_ptr<Settings>, c10d::Backend::Options>(m, "Options")
      .def(py::init([](std::optional<std::string> algorithm, std::optional<size_t> slot_bytes,
                       std::optional<int> slots, std::optional<std::string> on_loss,
                       std::optional<int> min_ranks, std::optional<double> stall_seconds,
                       std::optional<std::string> order, std::variant<bool, std::string> join) {
             auto made = c10::make_intrusive<Settings>();
             made->algorithm = std::move(algorithm);
             made->slot_bytes = slot_bytes;
             made->slots = slots;
             made->on_loss = std::move(on_loss);
             made->min_ranks = min_ranks;
             made->stall_seconds = stall_seconds;
             made->order = std::move(order);
             made->join = std::move(join);
             return made;
           }),
           "algorithm"_a = py::none(), "slot_bytes"_a = py::none(), "slots"_a = py::none(),
           "on_loss"_a = py::none(), "min_ranks"_a = py::none(), "stall_seconds"_a = py::none(),
           "order"_a = py::none(), "join"_a = "auto")
      .def_readonly("algorithm", &Settings::algorithm)
      .def_readonly("slot_bytes", &Settings::slot_bytes)
      .def_readonly("slots", &Settings::slots)
      .def_readonly("on_loss", &Settings::on_loss)
      .def_readonly("min_ranks", &Settings::min_ranks)
      .def_readonly("stall_seconds", &Settings::stall_seconds)
      .def_readonly("order", &Settings::order)
      .def_readonly("join", &Settings::join)
      .def("__repr__",
           [](const py::object& self) {
             return py::module_::import("ringreduce").attr("Options").attr("__repr__")(self);
           })
      // Copies, as split_group makes one of its group's.
      .def("__reduce__", [](const py::object& self) {
        return py::module_::import("ringreduce").attr("Options").attr("__reduce__")(self);
      });
}

BackendPtr createBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                         double timeout, const std::string& name,
                         const std::vector<int>& global_ranks, const Settings& settings,
                         const std::string& gpu_facts, const py::object& make_inner,
                         const py::object& count_ranks, int of_ranks, const std::string& connect,
                         const std::shared_ptr<Attempt>& cancel, bool keeps_store,
                         const std::string& launcher, const std::string& job,
                         const std::string& program) {
  const auto make = shared(make_inner), count = shared(count_ranks);
  Backend::Gpus gpus{.facts = gpu_facts,
                     .make_inner =
                         [make](const c10::intrusive_ptr<c10d::Store>& at, int r, int n) {
                           const py::gil_scoped_acquire gil;
                           return (*make)(at, r, n).cast<BackendPtr>();
                         },
                     .count_ranks =
                         [count](int n) {
                           const py::gil_scoped_acquire gil;
                           return (*count)(n).cast<int>();
                         }};
  watchInterrupts();
  const py::gil_scoped_release no_gil;  // ranks that are threads of one process join one another
  try {
    GroupOptions options;
    options.name = name;
    options.global_ranks = global_ranks;
    options.timeout = nanosOf(timeout);
    options.of_ranks = of_ranks;
    options.attempt = cancel;
    options.interrupt = &checkSignals;
    options.interrupted = &interruptedSince;
    options.launcher = launcher;
    options.job = job;
    options.program = program;
    if (settings.stall_seconds)
      options.stall = nanosOf(*settings.stall_seconds);
    else if (connect != "now")
      options.stall = nanosOf(stallSeconds(options.shown(rank)));
    else
      try {
        options.stall = nanosOf(Config::read().stall_seconds.get());
      } catch (const Error& error) {
        options.refusal = error;
      }
    Backend::ChooseShared choose_shared;
    if (settings.setsShared())
      choose_shared = [settings](int ranks) {
        return settings.over(SharedOptions::fromEnvironment(ranks), ranks);
      };
    using Connect = Backend::Connect;
    static const std::map<std::string, Connect> kWays{{"now", Connect::kNow},
                                                      {"reconfigure", Connect::kByReconfigure},
                                                      {"join", Connect::kByPrepare}};
    return c10::make_intrusive<Backend>(store, rank, size, options, settings, std::move(gpus),
                                        kWays.at(connect), std::move(choose_shared), keeps_store);
  } catch (const Error&) {
    rethrowToPython();
  }
}

c10::intrusive_ptr<c10d::Work> averageBucket(const BackendPtr& backend, c10d::GradBucket& bucket,
                                             const GroupPtr& group) {
  const py::gil_scoped_release no_gil;
  return c10::make_intrusive<HookWork>(averageGradBucket({backend, group}, bucket));
}

// Ranks by host, the hosts' names, how their ring came about, the hosts and ranks in its order, and
// the rates from host to host in Mbit/s.
py::tuple topologyOf(const BackendPtr& backend) {
  const std::shared_ptr<Group> group = asRingreduce(*backend).group();
  const std::shared_ptr<Epoch> epoch = group->epoch();
  std::vector<std::vector<int>> hosts;
  std::vector<std::string> names;
  const Hosts* known = epoch->hosts.get();
  const auto named = [&](std::vector<int> ranks) {
    for (int& rank : ranks) rank = epoch->ranks.rankAt(rank);
    return ranks;
  };
  for (int host = 0; known && host < known->count(); ++host) {
    hosts.push_back(named(known->ranksOn(host)));
    names.push_back(known->machineOf(known->ranksOn(host).front()));
  }
  const HostRing none{.hosts = {}};
  const HostRing* found = epoch->ring();
  const HostRing& ring = found ? *found : none;
  static constexpr const char* kSources[] = {"ranks", "given", "measured"};
  return py::make_tuple(hosts, names, kSources[static_cast<size_t>(ring.source)], ring.hosts,
                        named(ring.ranks), ring.mbit);
}

// The records from index `since` on, as they lie in memory: ringreduce/observe/record.py has their
// layout.  Those that have not begun, or are not over, come last.  `collect` gets both parts of the
// group without the interpreter's lock: who holds a lock of the group may wait for that one.
template <class Collect>
py::bytes recordBytes(const BackendPtr& backend, Collect collect) {
  std::vector<OpRecord> records;
  {
    const py::gil_scoped_release release;
    const std::shared_ptr<Group> group = asRingreduce(*backend).group();
    const auto [over, later] = collect(*group);
    records = over;
    records.insert(records.end(), later.begin(), later.end());
  }
  return {reinterpret_cast<const char*>(records.data()), records.size() * sizeof(OpRecord)};
}

py::bytes recordsOf(const BackendPtr& backend, uint64_t since) {
  return recordBytes(backend, [since](const Group& group) {
    return std::pair(group.recorder().since(since), group.queued());
  });
}

// Those of GPU operations, of each GPU that this rank has used.
std::vector<py::bytes> gpuRecordsOf(const BackendPtr& backend, const std::vector<uint64_t>& since) {
  std::vector<std::vector<OpRecord>> records;
  {
    const py::gil_scoped_release release;
    records = asRingreduce(*backend).gpuRecords(since);
  }
  std::vector<py::bytes> found;
  for (const std::vector<OpRecord>& one : records)
    found.emplace_back(reinterpret_cast<const char*>(one.data()), one.size() * sizeof(OpRecord));
  return found;
}

py::bytes messagesOf(const BackendPtr& backend, uint64_t since) {
  return recordBytes(backend, [since](const Group& group) {
    return std::pair(group.messages().since(since), group.pendingMessages());
  });
}

py::tuple asTuple(const Totals& totals) {
  py::dict kinds, waited;
  for (size_t k = 0; k < totals.kinds.size(); ++k)
    if (const auto& sums = totals.kinds[k]; sums.operations > 0)
      kinds[kKindTable[k].name] =
          py::make_tuple(sums.operations, sums.bytes, static_cast<double>(sums.nanos) / 1e9);
  for (const auto& [rank, nanos] : totals.waited)
    waited[py::int_(rank)] = static_cast<double>(nanos) / 1e9;
  return py::make_tuple(totals.failed, kinds, waited);
}

// Of all operations so far: how many failed; by kind that of operations, bytes and seconds in them;
// by rank, as errors number it, the seconds that this rank waited for what began with it, in
// messages too.  Then the same of GPU operations, of each GPU that this rank has used.
py::list totalsOf(const BackendPtr& backend) {
  std::vector<Totals> totals;
  {
    const py::gil_scoped_release release;
    totals = asRingreduce(*backend).totals();
  }
  py::list found;
  for (const Totals& one : totals) found.append(asTuple(one));
  return found;
}

// For each rank of another host that this one has sent data to: bytes, seconds in which the line
// was busy, and packets that were sent again.
std::vector<std::tuple<int, uint64_t, double, uint64_t>> linesOf(const BackendPtr& backend) {
  const std::shared_ptr<Epoch> epoch = asRingreduce(*backend).group()->epoch();
  std::vector<std::tuple<int, uint64_t, double, uint64_t>> lines;
  for (const Line& line : epoch->wires->lines())
    lines.emplace_back(epoch->ranks.rankAt(line.to), line.bytes,
                       static_cast<double>(line.busy) / 1e9, line.retransmits);
  return lines;
}

// The names of the numbers in records.
py::dict recordNames() {
  const auto names = [](const auto& table, auto name_of) {
    py::list all;
    for (const auto& entry : table) all.append(name_of(entry));
    return all;
  };
  const auto field = [](const auto& entry) { return entry.name; };
  const auto text = [](const char* entry) { return entry; };
  return py::dict("kinds"_a = names(kKindTable, field), "dtypes"_a = names(kDTypes, field),
                  "ops"_a = names(kReduceOpNames, text),
                  "algorithms"_a = names(kAlgorithmNames, text),
                  "codecs"_a = names(kCodecTable, field));
}

// How many nanoseconds this host's clock is ahead of the group's, and the bound of its error; -1:
// it is not known yet.
std::pair<Nanos, Nanos> clockOffset(const BackendPtr& backend) {
  const ClockOffset offset = asRingreduce(*backend).group()->epoch()->arbiter->clock();
  return {offset.ahead, offset.isKnown() ? offset.error : -1};
}

// When ranks came to the operation with this number in errors, as far as is known: ranks, times of
// this host's clock, and why they did not come sooner (Inherited).  Between hosts, `ask` asks the
// others, without waiting.
std::vector<std::tuple<int, Nanos, int32_t, uint32_t, uint32_t>> arrivalsOf(
    const BackendPtr& backend, uint64_t sequence, bool ask) {
  const std::shared_ptr<Epoch> epoch = asRingreduce(*backend).group()->epoch();
  std::vector<std::tuple<int, Nanos, int32_t, uint32_t, uint32_t>> known;
  if (!epoch->network) return known;  // its record has them all
  if (ask) epoch->network->askForProgress(sequence);
  const Nanos ahead = epoch->arbiter->clock().ahead;
  const std::vector<Announcement> calls = epoch->peers().calls(sequence);
  for (int position = 0; position < epoch->size; ++position)
    if (const Announcement& call = calls[static_cast<size_t>(position)]; call.arrived != 0)
      known.emplace_back(epoch->ranks.rankAt(position), call.arrived + ahead, call.why.rank,
                         call.why.micros, call.why.sequence);
  return known;
}

std::vector<int> bestRingOf(const Rates& rates) {
  try {
    return bestRing(rates);
  } catch (const Error& error) {
    throw py::value_error(error.what());
  }
}

constexpr std::pair<const char*, double WireCost::*> kCosts[] = {
    {"hop", &WireCost::hop},       {"message", &WireCost::message},
    {"byte", &WireCost::byte},     {"measured", &WireCost::measured},
    {"memory", &WireCost::memory}, {"crowd", &WireCost::crowd}};

WireCost costFrom(const py::dict& given) {
  WireCost cost;
  for (const auto& [name, field] : kCosts)
    if (given.contains(name)) cost.*field = given[name].cast<double>();
  return cost;
}

py::dict costTo(const WireCost& cost) {
  py::dict all;
  for (const auto& [name, field] : kCosts) all[name] = cost.*field;
  all["system"] = WireCost::kSystem;
  return all;
}

// What runs for a call, why, and of each candidate its name, seconds, hops, messages and bytes:
// there are none where all share memory.
py::tuple chooseFor(const std::string& kind_name, size_t bytes, size_t partial_bytes,
                    size_t coded_bytes, int world_size, int ranks_on_host, bool in_memory,
                    const py::dict& given, const std::string& wanted,
                    const std::string& order_name) {
  const auto algorithm = algorithmNamed(wanted);
  const AddOrder order = orderNamed(order_name);
  if (order == AddOrder::kRank && algorithm && !addsByRank(*algorithm))
    throw py::value_error("the algorithm '" + wanted + "' cannot add in the order of ranks");
  const auto* kind = std::ranges::find(kKindTable, kind_name, &KindInfo::name);
  const bool even = coded_bytes > 0 || world_size % std::max(1, ranks_on_host) == 0;
  if (!algorithm || kind == std::end(kKindTable) || world_size < 2 || ranks_on_host < 1 || !even)
    throw py::value_error("there is no such algorithm, call or group");
  WireCost cost = costFrom(given);
  cost.ranks_on_host = ranks_on_host;
  const auto of_table = static_cast<Kind>(kind - std::begin(kKindTable));
  const AlgorithmChoice choice = choose(
      {.kind = coded_bytes > 0 ? Kind::kCompressedAllReduce : of_table,
       .bytes = bytes,
       .partial_bytes = partial_bytes,
       .coded_bytes = coded_bytes,
       .wanted = *algorithm},
      {.ranks = world_size, .ranks_on_host = ranks_on_host, .in_memory = in_memory, .order = order},
      cost);
  const auto name = [](Algorithm one) {
    return one == kNoAlgorithm ? "" : kAlgorithmNames[static_cast<size_t>(one)];
  };
  py::list candidates;
  for (const Candidate& one : choice.candidates())
    candidates.append(
        py::make_tuple(name(one.algorithm), one.seconds, one.hops, one.messages, one.bytes));
  return py::make_tuple(name(choice.taken.algorithm), choice.why, candidates);
}

// ---- compressed all-reduces and the compressing hook

// The value that `find` finds by a name, or ValueError.
template <class Find>
auto named(Find find, const std::string& given, const char* what, const std::string& known) {
  const auto found = find(given);
  if (!found)
    throw py::value_error("ringreduce has no " + std::string(what) + " \"" + given + "\", but " +
                          known);
  return *found;
}
Codec codecOf(const std::string& given) {
  return named(codecNamed, given, "codec", codecNames());
}
CodedSchedule scheduleOf(const std::string& given) {
  return named(codedScheduleNamed, given, "schedule of compressed all-reduces",
               codedScheduleNames());
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

// ---- the sparse codec (kernels/sparse_codec.h), of tensors in the host's memory

double shareOf(double share) {
  if (!(share > 0 && share <= 1))
    throw py::value_error("share must be above 0 and at most 1, not " + std::to_string(share));
  return share;
}
template <class T>
T* elementsOf(const at::Tensor& tensor, at::ScalarType type) {
  requireDense(tensor, "sparse codec");
  if (tensor.scalar_type() != type || !tensor.is_contiguous())
    refuse("sparse codec",
           std::string("takes contiguous tensors of ") + c10::toString(type) + " here, not " +
               (tensor.scalar_type() != type ? c10::toString(tensor.scalar_type()) : "a view"));
  return static_cast<T*>(tensor.data_ptr());
}

void encodeSparse(const at::Tensor& output, const at::Tensor& input, double share,
                  const std::optional<at::Tensor>& error) {
  std::byte* const out = elementsOf<std::byte>(output, at::kByte);
  const float* const in = elementsOf<float>(input, at::kFloat);
  float* const lost = error ? elementsOf<float>(*error, at::kFloat) : nullptr;
  const size_t count = static_cast<size_t>(input.numel());
  if (static_cast<size_t>(output.numel()) != sparseBytes(count, shareOf(share)) ||
      (error && error->numel() != input.numel()))
    throw py::value_error("the code of " + std::to_string(count) + " elements has " +
                          std::to_string(sparseBytes(count, share)) + " bytes, and its error " +
                          std::to_string(count) + " elements; the output has " +
                          std::to_string(output.numel()) + ", the error " +
                          std::to_string(error ? error->numel() : input.numel()));
  const py::gil_scoped_release no_gil;
  sparseEncode(out, lost, in, count, share);
}

bool decodeAddSparse(const at::Tensor& sum, const at::Tensor& input, double share) {
  float* const to = elementsOf<float>(sum, at::kFloat);
  const std::byte* const in = elementsOf<std::byte>(input, at::kByte);
  shareOf(share);
  const py::gil_scoped_release no_gil;
  return sparseDecodeAdd(to, in, static_cast<size_t>(input.numel()),
                         static_cast<size_t>(sum.numel()), share);
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

void bindCompression(py::module_& m) {
  m.def("compressed_all_reduce", &startCompressed, "backend"_a, "input"_a, "output"_a,
        py::kw_only(), "codec"_a, "op"_a = "sum", "schedule"_a = "auto", "stochastic"_a = false,
        "seed"_a = 0, "error"_a = py::none(), "async_op"_a = true);
  m.def(
      "sparse_bytes",
      [](size_t elements, double share) { return sparseBytes(elements, shareOf(share)); },
      "elements"_a, "share"_a);
  m.def("sparse_encode", &encodeSparse, "output"_a, "input"_a, "share"_a, "error"_a);
  m.def("sparse_decode_add", &decodeAddSparse, "sum"_a, "input"_a, "share"_a);

  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<HookState, std::shared_ptr<HookState>>(m, "HookState")
      .def(py::init(&makeState), "parameters"_a, "exact"_a, "names"_a, "codec"_a, "feedback"_a,
           "start_after"_a, "schedule"_a, "stochastic"_a, "seed"_a)
      .def(
          "agree",
          [](HookState& state, const BackendPtr& backend) {
            translated([&] { state.core().agree(*asRingreduce(checked(backend)).group()); });
          },
          no_gil, "backend"_a)
      .def(
          "register",
          [](const std::shared_ptr<HookState>& state, c10d::Reducer& reducer,
             const BackendPtr& backend, const GroupPtr& group) {
            checked(backend);
            registerCommHook(reducer, {backend, group}, state);
          },
          "reducer"_a, "backend"_a, "group"_a)
      .def(
          "average_bucket",
          [](const std::shared_ptr<HookState>& state, const BackendPtr& backend,
             c10d::GradBucket& bucket, const GroupPtr& group) -> c10::intrusive_ptr<c10d::Work> {
            checked(backend);
            return c10::make_intrusive<HookWork>(state->average({backend, group}, bucket));
          },
          no_gil, "backend"_a, "bucket"_a, "group"_a)
      .def("residual", &readResidual, no_gil, "parameter"_a)
      .def("set_residual", &writeResidual, no_gil, "parameter"_a, "values"_a)
      .def(
          "scale_residuals",
          [](HookState& state, float factor) {
            translated([&] { state.core().scaleResiduals(factor); });
          },
          no_gil, "factor"_a)
      .def(
          "residual_bytes", [](HookState& state) { return state.core().residualBytes(); }, no_gil)
      .def(
          "steps", [](HookState& state) { return state.core().steps(); }, no_gil)
      .def(
          "set_steps",
          [](HookState& state, uint64_t steps) {
            translated([&] { state.core().setSteps(steps); });
          },
          no_gil, "steps"_a)
      .def(
          "choice", [](HookState& state) { return state.core().choice(); }, no_gil)
      .def("why", [](HookState& state) { return state.core().why(); }, no_gil);
}

// Checks a variable with the layers above base; throws Error.
void checkFurther(const std::string& name, const std::string& text) {
  const Config config = Config::read();
  if (name == "RINGREDUCE_SLOT_BYTES")
    SharedOptions{.slot_bytes = static_cast<size_t>(config.slot_bytes.get())}.validate();
  if (name == "RINGREDUCE_TLS") SharedOptions{.encrypted = config.tls.get() == 1}.validate();
  if (name == "RINGREDUCE_IF") net::choose(net::interfaces(), text, std::nullopt);
  if (name == "RINGREDUCE_PORTS") net::Ports::fromText(text);
  if (name == "RINGREDUCE_CONGESTION") net::checkCongestion(text);
  if (name == "RINGREDUCE_RING") RingSetting::fromText(text);
}

// The table of environment variables, with what is set now.
py::list config() {
  py::list all;
  for (Variable& each : variables()) {
    try {
      if (each.error.empty() && !each.text.empty()) checkFurther(each.name, each.text);
    } catch (const Error& error) {
      each.error = error.what();
    }
    all.append(py::dict("name"_a = each.name, "default"_a = each.fallback, "values"_a = each.values,
                        "meaning"_a = each.meaning, "holds"_a = each.holds,
                        "reader"_a = each.reader, "value"_a = each.text, "error"_a = each.error));
  }
  return all;
}

// Sockets that listen where a group whose store is on that host would: the interface, address with
// port and descriptor of each, which belong to the caller; and why it is there.
py::tuple listenFor(const std::string& store_host) {
  const Config config = Config::read();
  const std::string ports = config.ports.get();
  const net::Choice choice = net::chooseFor(store_host, config.interfaces.get());
  net::Listener listener =
      net::listenOn(choice.addresses, ports.empty() ? net::Ports{} : net::Ports::fromText(ports));
  py::list sockets;
  for (size_t i = 0; i < listener.sockets.size(); ++i) {
    const net::Address& address = listener.addresses[i];
    sockets.append(py::make_tuple(choice.nameOf(address), address.hostText(), address.port(),
                                  listener.sockets[i].release()));
  }
  return py::make_tuple(sockets, choice.why);
}

}  // namespace
}  // namespace ringreduce

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace ringreduce;
  py::module_::import("torch.distributed");  // registers the types that the signatures name
  // The type of Backend.mem_allocator: torch's CPU builds have no class for allocators.
  py::class_<PageAllocator, std::shared_ptr<PageAllocator>>(m, "PageAllocator");

  py::class_<Attempt, std::shared_ptr<Attempt>>(m, "Cancel")
      .def(py::init<std::string>(), "what"_a)
      .def("end", [](Attempt& cancel) { cancel.end("abort() was called"); })
      .def("check", [](const Attempt& cancel) { translated([&] { cancel.check(); }); });

  bindSettings(m);
  m.def("create_backend", &createBackend, "store"_a, "rank"_a, "size"_a, "timeout"_a, "name"_a,
        "global_ranks"_a, "options"_a, py::kw_only(), "gpu_facts"_a, "make_inner"_a,
        "count_ranks"_a, "of_ranks"_a = 0, "connect"_a = "now", "cancel"_a = py::none(),
        "keeps_store"_a = false, "launcher"_a = "", "job"_a = "", "program"_a = "");
  m.def(
      "store_of", [](const BackendPtr& backend) { return asRingreduce(*backend).store(); },
      "backend"_a);
  m.def("prefix_in_tcp_store", &prefixInTcpStore, "store"_a);
  m.def("begin_on_store", &beginOnStore, py::call_guard<py::gil_scoped_release>(), "store"_a);
  m.def(
      "prepare",
      [](const BackendPtr& backend, const std::string& place, const std::vector<int>& members,
         double timeout) { asRingreduce(*backend).prepare(place, members, nanosOf(timeout)); },
      py::call_guard<py::gil_scoped_release>(), "backend"_a, "place"_a, "members"_a, "timeout"_a);
  m.def(
      "set_roots_move",
      [](const BackendPtr& backend, bool move) { asRingreduce(*backend).setRootsMove(move); },
      "backend"_a, "move"_a);
  m.def(
      "lend_buckets", [](const BackendPtr& backend) { asRingreduce(*backend).lendBuckets(); },
      "backend"_a);
  m.def("shutdown_all", &shutdownAll, py::call_guard<py::gil_scoped_release>());
  const auto property = [&](const char* name, auto method, auto... guard) {
    const auto get = [method](const BackendPtr& b) { return (asRingreduce(*b).*method)(); };
    m.def(name, get, guard..., "backend"_a);
  };
  const py::call_guard<py::gil_scoped_release> no_gil;
  property("staging_bytes", &Backend::stagingBytes);
  property("gpu_bytes", &Backend::gpuBytes, no_gil);
  property("routes", &Backend::routes);
  m.def("records", &recordsOf, "backend"_a, "since"_a);
  m.def("gpu_records", &gpuRecordsOf, "backend"_a, "since"_a);
  m.def("messages", &messagesOf, "backend"_a, "since"_a);
  m.def("totals", &totalsOf, "backend"_a);
  m.def("lines", &linesOf, py::call_guard<py::gil_scoped_release>(), "backend"_a);
  m.def("arrivals", &arrivalsOf, py::call_guard<py::gil_scoped_release>(), "backend"_a,
        "sequence"_a, "ask"_a);
  m.def("record_names", &recordNames);
  m.def("clock_offset", &clockOffset, "backend"_a);
  m.def(
      "recorder_id",
      [](const BackendPtr& backend) { return asRingreduce(*backend).group()->recorder().id(); },
      "backend"_a);
  m.def(
      "meeting",
      [](const BackendPtr& backend) { return asRingreduce(*backend).group()->meeting(); },
      "backend"_a);
  m.def("training_step", [] { return training_step.load(); });
  m.def("count_training_step", [] { return ++training_step; });
  property("live_ranks", &Backend::liveRanks, no_gil);
  property("has_raised", &Backend::hasRaised, no_gil);
  property("has_failed", &Backend::hasFailed);
  property("check", &Backend::check, no_gil);
  property("commit", &Backend::commit, no_gil);
  m.def(
      "found_inf",
      [](const BackendPtr& backend, c10::Device device) {
        return asRingreduce(*backend).foundInf(device);
      },
      no_gil, "backend"_a, "device"_a);
  m.def(
      "is_mapped",
      [](const BackendPtr& backend, const at::Tensor& tensor) {
        return asRingreduce(*backend).isMapped(tensor);
      },
      no_gil, "backend"_a, "tensor"_a);
  property("is_idle", &Backend::isIdle, no_gil);
  property("goes_on", &Backend::goesOn);
  property("timeout_seconds", &Backend::timeoutSeconds);
  property("is_connected", &Backend::isConnected);
  property("is_ended", &Backend::isEnded);
  property("enter_prepared", &Backend::enterPrepared, no_gil);
  property("drop_prepared", &Backend::dropPrepared, no_gil);
  m.def(
      "register_comm_hook",
      [](c10d::Reducer& reducer, const BackendPtr& backend, const GroupPtr& group) {
        registerCommHook(reducer, {backend, group});
      },
      "reducer"_a, "backend"_a, "group"_a);
  m.def("average_bucket", &averageBucket, "backend"_a, "bucket"_a, "group"_a);
  bindCompression(m);
  m.def("topology", &topologyOf, "backend"_a);
  m.def("best_ring", &bestRingOf, "rates"_a);
  m.def("choose", &chooseFor, "kind"_a, "bytes"_a, "partial_bytes"_a, "coded_bytes"_a,
        "world_size"_a, "ranks_on_host"_a, "in_memory"_a, "cost"_a, "wanted"_a = "auto",
        "order"_a = "ring");
  m.def(
      "coded_bytes",
      [](const std::string& codec, size_t elements) {
        return codedBytes(codecOf(codec), elements);
      },
      "codec"_a, "elements"_a);
  m.def(
      "wire_cost",
      [](const BackendPtr& backend) {
        return costTo(backend ? asRingreduce(*backend).group()->epoch()->wireCost() : WireCost{});
      },
      "backend"_a);
  m.def(
      "shared_tensor",
      [](const std::vector<int64_t>& sizes, at::ScalarType dtype) {
        return translated([&] { return sharedTensor(sizes, at::TensorOptions(dtype)); });
      },
      "sizes"_a, "dtype"_a);
  m.def("config", &config);
  m.def(
      "listen_for",
      [](const std::string& store_host) {
        return translated([&] { return listenFor(store_host); });
      },
      "store_host"_a);
  m.def("instruction_set", &instructionSet);
  m.def("cuda_build", &cudaBuild);
  m.def(
      "facts_of",
      [](const std::string& text) -> py::object {
        const auto facts = factsOf(text);
        if (!facts) return py::none();
        const auto orNone = [](int rank) -> py::object {
          return rank < 0 ? py::object(py::none()) : py::int_(rank);
        };
        return py::make_tuple(orNone(facts->rank), orNone(facts->reporter), facts->group,
                              facts->is_final);
      },
      "text"_a);
  m.def(
      "set_error_types",
      [](const py::object& peer_lost, const py::object& timeout, const py::object& mismatch,
         const py::object& aborted, const py::object& other) {
        setErrorTypes(peer_lost.ptr(), timeout.ptr(), mismatch.ptr(), aborted.ptr(), other.ptr());
      },
      "peer_lost"_a, "timeout"_a, "mismatch"_a, "aborted"_a, "other"_a);
}
