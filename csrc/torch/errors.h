// The core's errors as Python exceptions, and Ctrl-C.
//
// An exception that derives from torch::PyTorchError arrives in Python as the class it names, from
// dist.*, Work.wait, Future.wait and DDP's backward alike.  The classes themselves are Python's
// (ringreduce/errors.py), handed over once when the extension is loaded.
#pragma once

#include <Python.h>

#include <exception>
#include <string>

#include "base/error.h"

namespace ringreduce {

// Borrowed for the life of the process: PeerLost, Timeout, Mismatch, Aborted and Error, in this
// order.
void setErrorTypes(PyObject* peer_lost, PyObject* timeout, PyObject* mismatch, PyObject* aborted,
                   PyObject* other);

// The error as one that Python understands, with `context` (a bucket, say) in parentheses behind
// its text.  kArgument becomes ValueError; what is not an Error stays as it is.
std::exception_ptr toPython(std::exception_ptr error, const std::string& context = "");

// Throws what toPython makes of the exception being handled.
[[noreturn]] void rethrowToPython(const std::string& context = "");

// Runs Python's signal handlers; throws KeyboardInterrupt after Ctrl-C.  Waits call it.
void checkSignals();

}  // namespace ringreduce
