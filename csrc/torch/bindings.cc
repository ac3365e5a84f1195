// ringreduce._C: what Python sees of the extension.  Its stubs are ringreduce/_C.pyi.
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "algorithm/explain.h"
#include "base/config.h"
#include "bootstrap/host_ring.h"
#include "bootstrap/hosts.h"
#include "bootstrap/options.h"
#include "kernels/reduce.h"
#include "torch/backend.h"
#include "torch/comm_hook.h"
#include "torch/compression_bindings.h"
#include "torch/cuda_build.h"
#include "torch/errors.h"
#include "torch/memory.h"
#include "torch/python_objects.h"
#include "transport/tcp/acceptor.h"
#include "transport/tcp/address.h"

namespace py = pybind11;

namespace ringreduce {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// Seconds as nanoseconds; more than the clock can count means never.
Nanos nanosOf(double seconds) {
  return seconds * kSecond < static_cast<double>(kNever) ? static_cast<Nanos>(seconds * kSecond)
                                                         : kNever;
}

// Read before the other ranks can be told, so the error says whose it is.
double stallSeconds(const std::string& rank) {
  try {
    return Config::read().stall_seconds.get();
  } catch (const Error& error) {
    throw Error(error.kind(),
                "rank " + rank + " (pid " + std::to_string(getpid()) + "): " + error.what());
  }
}

// What is not given comes from the environment.
BackendPtr createBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                         double timeout, const std::string& name,
                         const std::vector<int>& global_ranks,
                         const std::optional<std::string>& algorithm,
                         std::optional<size_t> slot_bytes, std::optional<int> slots,
                         std::optional<double> stall_seconds, const std::string& gpu_facts,
                         const py::object& make_inner, int of_ranks) {
  const auto call = shared(make_inner);
  Backend::Gpus gpus{.facts = gpu_facts,
                     .make_inner = [call](const c10::intrusive_ptr<c10d::Store>& at, int r, int n) {
                       const py::gil_scoped_acquire gil;
                       return (*call)(at, r, n).cast<BackendPtr>();
                     }};
  watchInterrupts();
  const py::gil_scoped_release no_gil;  // ranks that are threads of one process join one another
  try {
    GroupOptions options;
    options.name = name;
    options.global_ranks = global_ranks;
    options.timeout = nanosOf(timeout);
    options.of_ranks = of_ranks;
    options.interrupt = &checkSignals;
    options.interrupted = &interruptedSince;
    options.stall = nanosOf(stall_seconds ? *stall_seconds : stallSeconds(options.shown(rank)));
    // Given by the caller: rank 0 refuses for all what it cannot work with.  The environment is
    // read by rank 0 alone, inside.
    if (rank == 0 && (algorithm || slot_bytes || slots)) {
      options.shared = SharedOptions::fromEnvironment(size);
      if (algorithm) options.shared->algorithm = algorithmNamed(*algorithm).value_or(kNoAlgorithm);
      options.shared->slot_bytes = slot_bytes.value_or(options.shared->slot_bytes);
      options.shared->slots = slots.value_or(options.shared->slots);
    }
    return c10::make_intrusive<Backend>(store, rank, size, options, std::move(gpus));
  } catch (const Error&) {
    rethrowToPython();
  }
}

c10::intrusive_ptr<c10d::Work> averageBucket(const BackendPtr& backend, c10d::GradBucket& bucket) {
  const py::gil_scoped_release no_gil;
  return c10::make_intrusive<HookWork>(averageGradBucket(*backend, bucket));
}

// Ranks by host, the hosts' names, how their ring came about, the hosts and ranks in its order, and
// the rates from host to host in Mbit/s.
py::tuple topologyOf(const BackendPtr& backend) {
  const std::shared_ptr<Group> held = asRingreduce(*backend).group();
  const Group& group = *held;
  std::vector<std::vector<int>> hosts;
  std::vector<std::string> names;
  const Hosts* known = group.hosts();
  for (int host = 0; known && host < known->count(); ++host) {
    hosts.push_back(known->ranksOn(host));
    names.push_back(known->machineOf(hosts.back().front()));
  }
  const HostRing none{.hosts = {}};
  const HostRing& ring = group.ring() ? *group.ring() : none;
  static constexpr const char* kSources[] = {"ranks", "given", "measured"};
  return py::make_tuple(hosts, names, kSources[static_cast<size_t>(ring.source)], ring.hosts,
                        ring.ranks, ring.mbit);
}

std::vector<int> bestRingOf(const Rates& rates) {
  try {
    return bestRing(rates);
  } catch (const Error& error) {
    throw py::value_error(error.what());
  }
}

WireCost costFrom(const py::dict& given) {
  WireCost cost;
  const std::pair<const char*, double*> fields[] = {{"hop", &cost.hop},
                                                    {"message", &cost.message},
                                                    {"byte", &cost.byte},
                                                    {"memory", &cost.memory},
                                                    {"crowd", &cost.crowd}};
  for (const auto& [name, field] : fields)
    if (given.contains(name)) *field = given[name].cast<double>();
  return cost;
}

py::dict costTo(const WireCost& cost) {
  py::dict all;
  all["hop"] = cost.hop;
  all["message"] = cost.message;
  all["byte"] = cost.byte;
  all["memory"] = cost.memory;
  all["crowd"] = cost.crowd;
  all["system"] = WireCost::kSystem;
  return all;
}

// The choice, why, and of each candidate its name, seconds, hops and bytes: there are none where
// all share memory.
py::tuple explain(size_t bytes, size_t partial_bytes, int world_size, int ranks_on_host,
                  bool sockets, const std::string& wanted, const py::dict& given) {
  const auto algorithm = algorithmNamed(wanted);
  if (algorithm && world_size >= 2 && ranks_on_host == world_size && !sockets) {
    const Algorithm choice = chooseAllReduce(bytes, world_size, *algorithm);
    return py::make_tuple(kAlgorithmNames[static_cast<size_t>(choice)],
                          choice == *algorithm            ? "asked for"
                          : choice == Algorithm::kTwoShot ? "shares the addition out"
                          : world_size == 2               ? "two ranks: one wait a slice"
                                                          : "small: one wait a slice",
                          py::list());
  }
  if (!algorithm || world_size < 2 || ranks_on_host < 1 || world_size % ranks_on_host != 0)
    throw py::value_error("there is no such algorithm, or no such group");
  WireCost cost = costFrom(given);
  cost.ranks_on_host = ranks_on_host;
  const Explanation found =
      explainStreamAllReduce(bytes, partial_bytes, world_size, ranks_on_host, *algorithm, cost);
  py::list candidates;
  for (const Candidate& one : found.candidates)
    candidates.append(py::make_tuple(kAlgorithmNames[static_cast<size_t>(one.algorithm)],
                                     one.seconds, one.hops, one.bytes));
  return py::make_tuple(kAlgorithmNames[static_cast<size_t>(found.choice)], found.why, candidates);
}

// What layers above base find wrong with a variable that base can read; throws Error.
void checkFurther(const std::string& name, const std::string& text) {
  const Config config = Config::read();
  if (name == "RINGREDUCE_SLOT_BYTES")
    SharedOptions{.slot_bytes = static_cast<size_t>(config.slot_bytes.get())}.validate();
  if (name == "RINGREDUCE_TLS") SharedOptions{.encrypted = config.tls.get() == 1}.validate();
  if (name == "RINGREDUCE_IF") net::choose(net::interfaces(), text, std::nullopt);
  if (name == "RINGREDUCE_PORTS") net::Ports::fromText(text);
  if (name == "RINGREDUCE_CONGESTION") net::checkCongestion(text);
  if (name == "RINGREDUCE_RING") RingWish::fromText(text);
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
    py::dict row;
    row["name"] = each.name;
    row["default"] = each.fallback;
    row["values"] = each.values;
    row["meaning"] = each.meaning;
    row["holds"] = each.holds;
    row["reader"] = each.reader;
    row["value"] = each.text;
    row["error"] = each.error;
    all.append(row);
  }
  return all;
}

}  // namespace
}  // namespace ringreduce

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace ringreduce;
  py::module_::import("torch.distributed");  // registers the types that the signatures name
  // What Backend.mem_allocator returns: torch's CPU builds have no class for allocators.
  py::class_<PageAllocator, std::shared_ptr<PageAllocator>>(m, "PageAllocator");

  m.def("create_backend", &createBackend, py::arg("store"), py::arg("rank"), py::arg("size"),
        py::arg("timeout"), py::arg("name"), py::arg("global_ranks"),
        py::arg("algorithm") = py::none(), py::arg("slot_bytes") = py::none(),
        py::arg("slots") = py::none(), py::arg("stall_seconds") = py::none(), py::kw_only(),
        py::arg("gpu_facts"), py::arg("make_inner"), py::arg("of_ranks") = 0);
  m.def("shutdown_all", &Backend::shutdownAll, py::call_guard<py::gil_scoped_release>());
  m.def(
      "staging_bytes",
      [](const BackendPtr& backend) { return asRingreduce(*backend).stagingBytes(); },
      py::arg("backend"));
  m.def(
      "gpu_bytes", [](const BackendPtr& backend) { return asRingreduce(*backend).gpuBytes(); },
      py::call_guard<py::gil_scoped_release>(), py::arg("backend"));
  m.def(
      "routes", [](const BackendPtr& backend) { return asRingreduce(*backend).routes(); },
      py::arg("backend"));
  m.def(
      "has_raised", [](const BackendPtr& backend) { return asRingreduce(*backend).hasRaised(); },
      py::arg("backend"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "has_failed", [](const BackendPtr& backend) { return asRingreduce(*backend).hasFailed(); },
      py::arg("backend"));
  m.def("register_comm_hook", &registerCommHook, py::arg("reducer"), py::arg("backend"));
  m.def("average_bucket", &averageBucket, py::arg("backend"), py::arg("bucket"));
  bindCompression(m);
  m.def("topology", &topologyOf, py::arg("backend"));
  m.def("best_ring", &bestRingOf, py::arg("rates"));
  m.def("explain", &explain, py::arg("bytes"), py::arg("partial_bytes"), py::arg("world_size"),
        py::arg("ranks_on_host"), py::arg("sockets"), py::arg("wanted"), py::arg("cost"));
  m.def(
      "wire_cost",
      [](const BackendPtr& backend) {
        return costTo(backend ? asRingreduce(*backend).group()->wireCost() : WireCost{});
      },
      py::arg("backend"));
  m.def("config", &config);
  m.def("instruction_set", &instructionSet);
  m.def("cuda_build", &cudaBuild);
  m.def(
      "set_error_types",
      [](const py::object& peer_lost, const py::object& timeout, const py::object& mismatch,
         const py::object& aborted, const py::object& other) {
        setErrorTypes(peer_lost.ptr(), timeout.ptr(), mismatch.ptr(), aborted.ptr(), other.ptr());
      },
      py::arg("peer_lost"), py::arg("timeout"), py::arg("mismatch"), py::arg("aborted"),
      py::arg("other"));
}
