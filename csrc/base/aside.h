// Lets a signal handler wait for the operation that it interrupted.
//
// A wait of an operation runs the program's signal handlers in the thread that waits.  Meanwhile
// the operation stands still: its frames lie below those of the handler.  Other ranks wait for it,
// so a handler that calls a collective would wait for them without end, even in another group.  So
// a handler runs on a stack of its own.  Before it waits for other ranks, it steps aside: the
// operation goes on and ends on the stack below, and then the rest of the handler runs, before
// the call that made the operation returns.  Handlers that raise or call nothing end at once.
//
// Handlers nest, since a handler may be interrupted in its own operation, and several may step
// aside in one.  The last one goes on first, so the program's frames end in the order of a single
// stack.
#pragma once

#include <functional>

namespace ringreduce {

// Around an operation that runs in the caller's thread; `finishAsides` follows it.
class OperationHere {
 public:
  OperationHere();
  ~OperationHere();
  OperationHere(const OperationHere&) = delete;
  OperationHere& operator=(const OperationHere&) = delete;
};

// Calls `handler`, with its exceptions; in an operation of this thread, on a stack of its own.
// Returns when it has ended or has stepped aside.
void runAside(std::function<void()> handler);

// In a handler that interrupted an operation: returns when that operation is over.  Elsewhere it
// returns at once.
void stepAside();

// Whether handlers have stepped aside on this stack.  Until they have ended, nothing else of the
// program may run here that may wait.
bool haveAsides();

// Runs to their end the handlers that stepped aside in an operation of this stack, which is over.
// Throws the first of their exceptions when all have ended.
void finishAsides();

}  // namespace ringreduce
