// The core's errors as Python exceptions, and Ctrl-C.
//
// An exception that derives from torch::PyTorchError arrives in Python as the class it names, from
// dist.*, Work.wait, Future.wait and DDP's backward alike.  The classes themselves are Python's
// (ringreduce/errors.py), handed over once when the extension is loaded.
#pragma once

#include <Python.h>
#include <c10/util/Exception.h>

#include <exception>
#include <optional>
#include <string>

#include "base/clock.h"
#include "base/error.h"

namespace ringreduce {

// Borrowed for the life of the process: PeerLost, Timeout, Mismatch, Aborted and Error, in this
// order.
void setErrorTypes(PyObject* peer_lost, PyObject* timeout, PyObject* mismatch, PyObject* aborted,
                   PyObject* other);

// Of the error that this thread told Python last, if it has this text.
std::optional<Facts> factsOf(const std::string& text);

// The error as one that Python understands, with `context` (a bucket, say) in parentheses behind
// its text.  kArgument becomes ValueError; other exceptions stay as they are.  `several_threads` of
// this rank have called the group: a likely cause of a Mismatch, which then says so.
std::exception_ptr toPython(std::exception_ptr error, const std::string& context = "",
                            bool several_threads = false);

// Throws the exception being handled, converted by toPython.
[[noreturn]] void rethrowToPython(const std::string& context = "", bool several_threads = false);

// Runs `call` so that the core's errors leave as Python's.
template <class F>
auto translated(F&& call) {
  try {
    return call();
  } catch (const Error&) {
    rethrowToPython();
  }
}

// Runs `call`.  If a GPU has failed, which torch notices there, `abort` is told: the other ranks
// are not to wait for this one.
template <class F, class Abort>
auto orAbort(F&& call, Abort&& abort) {
  try {
    return call();
  } catch (const c10::AcceleratorError& error) {
    const std::string text = error.what_without_backtrace();
    abort("its GPU failed: " + text.substr(0, text.find('\n')));
    throw;
  }
}

// Runs Python's signal handlers; throws what they raise, KeyboardInterrupt after Ctrl-C.  Waits
// call it.  A handler that waits for the operation that it interrupted has not ended when this
// returns (base/aside.h).
void checkSignals();

// Installs a SIGINT handler that runs before Python's, unless another handler has replaced
// Python's.  A thread that waits in torch's own code (DDP's backward, Future.wait) runs no Python,
// so only the group's worker can end its wait.  Called with the GIL for each group, because the
// program may have set Python's handler again.
void watchInterrupts();

// Whether SIGINT came after `since` and more than a second ago: until then Python may handle it.
bool interruptedSince(Nanos since);

}  // namespace ringreduce
