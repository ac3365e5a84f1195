// Error to exception class.
#include "torch/errors.h"

#include <signal.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <optional>
#include <string_view>
#include <utility>

#include "base/aside.h"

namespace ringreduce {
namespace {

std::array<PyObject*, 5> error_types{};

PyObject* typeOf(Failure kind) {
  switch (kind) {
    case Failure::kPeerLost:
      return error_types[0];
    case Failure::kTimeout:
      return error_types[1];
    case Failure::kMismatch:
      return error_types[2];
    case Failure::kAborted:
      return error_types[3];
    case Failure::kArgument:
      return PyExc_ValueError;
    default:
      return error_types[4];
  }
}

// ---- Ctrl-C

std::atomic<Nanos> interrupt_time{0};
struct sigaction pythons_action;

void onInterrupt(int signal, siginfo_t* info, void* context) {
  interrupt_time.store(now());
  if (pythons_action.sa_flags & SA_SIGINFO)
    pythons_action.sa_sigaction(signal, info, context);
  else
    pythons_action.sa_handler(signal);
}

// ---- classes

// The last error that this thread has told Python.
thread_local struct {
  std::string text;
  Facts facts;
} told;

// torch passes on the class and the text alone.  It asks for the class right before it makes the
// exception, in the same thread, so the exception can ask for the facts of its text (factsOf).
struct PythonError final : torch::PyTorchError {
  PythonError(const Error& error, const std::string& text)
      : PyTorchError(text), kind(error.kind()), facts(error.facts()) {}
  PyObject* python_type() override {
    told = {what(), facts};
    return typeOf(kind);
  }
  Failure kind;
  Facts facts;
};

}  // namespace

std::optional<Facts> factsOf(const std::string& text) {
  if (told.text.empty() || told.text != text) return std::nullopt;
  return told.facts;
}

void setErrorTypes(PyObject* peer_lost, PyObject* timeout, PyObject* mismatch, PyObject* aborted,
                   PyObject* other) {
  error_types = {peer_lost, timeout, mismatch, aborted, other};
  for (PyObject* type : error_types) Py_INCREF(type);
}

std::exception_ptr toPython(std::exception_ptr error, const std::string& context,
                            bool several_threads) {
  if (!error) return error;
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    std::string text = e.what();
    if (!context.empty()) text += " (" + context + ")";
    if (several_threads && e.kind() == Failure::kMismatch)
      text +=
          " Several threads of this rank have called this group. If they call it at the same time, "
          "their calls have no common order on all ranks: give each thread a group of its own "
          "(dist.new_group()), as in async_save(process_group=...).";
    return std::make_exception_ptr(PythonError(e, text));
  } catch (...) {
    return error;
  }
}

void rethrowToPython(const std::string& context, bool several_threads) {
  std::rethrow_exception(toPython(std::current_exception(), context, several_threads));
}

void checkSignals() {
  // A daemon thread that waits while the process exits: taking the GIL would end the thread by an
  // unwinding that no C++ code expects.
#if PY_VERSION_HEX >= 0x030D0000
  if (Py_IsFinalizing()) return;
#else
  if (_Py_IsFinalizing()) return;
#endif
  const auto run = [] {
    const pybind11::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
  };
  // Python 3.14.0 takes each stack but the thread's own for one that overflows.
  static const bool changes_stacks = !std::string_view(Py_GetVersion()).starts_with("3.14.0");
  // Handlers run in Python's main thread, which is the process's, or, in a program that embeds
  // Python otherwise, on the stack that they interrupted.
  if (changes_stacks && gettid() == getpid())
    runAside(run);
  else
    run();
}

void watchInterrupts() {
  static bool watched = false;
  struct sigaction current;
  if (sigaction(SIGINT, nullptr, &current) != 0) return;
  if (current.sa_handler == SIG_DFL || current.sa_handler == SIG_IGN) return;
  // signal.signal puts Python's handler back.  Any other handler is left alone: it may call ours,
  // and ours would call it back without end.
  if (watched && current.sa_handler != pythons_action.sa_handler) return;
  watched = true;
  pythons_action = current;
  struct sigaction ours = current;
  ours.sa_flags |= SA_SIGINFO;
  ours.sa_sigaction = &onInterrupt;
  sigaction(SIGINT, &ours, nullptr);
}

bool interruptedSince(Nanos since) {
  const Nanos time = interrupt_time.load();
  if (time <= since || now() - time < kSecond) return false;
  // A handler of the user's own may mean something gentler by it than the end.
  const pybind11::gil_scoped_acquire gil;
  const auto signal = pybind11::module_::import("signal");
  return signal.attr("getsignal")(SIGINT).is(signal.attr("default_int_handler"));
}

}  // namespace ringreduce
