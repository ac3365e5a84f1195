// Stacks by ucontext, each of which runs one handler at a time.
#include "base/aside.h"

#include <cxxabi.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "base/fd.h"

// The sanitizers are told of each change of stack.
#if defined(__SANITIZE_ADDRESS__)
#define RINGREDUCE_ASAN 1
#elif defined(__SANITIZE_THREAD__)
#define RINGREDUCE_TSAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define RINGREDUCE_ASAN 1
#elif __has_feature(thread_sanitizer)
#define RINGREDUCE_TSAN 1
#endif
#endif
#ifdef RINGREDUCE_ASAN
#include <sanitizer/common_interface_defs.h>
#elif defined(RINGREDUCE_TSAN)
#include <sanitizer/tsan_interface.h>
#endif

namespace ringreduce {
namespace {

// As large as a program's own: handlers may do anything.  Only what they touch takes memory.
constexpr size_t kStackBytes = 8 << 20, kGuardBytes = 64 << 10;

class Stack {
 public:
  // Null without memory for it.
  static std::unique_ptr<Stack> make() {
    void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    std::unique_ptr<Stack> stack(new Stack(memory));
    return mprotect(memory, kGuardBytes, PROT_NONE) == 0 ? std::move(stack) : nullptr;
  }
  ~Stack() { munmap(memory_, kStackBytes); }
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;
  char* base() const { return static_cast<char*>(memory_); }

 private:
  explicit Stack(void* memory) : memory_(memory) {}
  void* const memory_;
};

// What C++ keeps of a thread's exceptions: those that are caught belong to a stack.
struct Exceptions {
  void* caught = nullptr;
  unsigned uncaught = 0;
};

void exchangeExceptions(Exceptions& kept) {
  auto* of_thread = reinterpret_cast<Exceptions*>(abi::__cxa_get_globals());
  std::swap(*of_thread, kept);
}

struct Handler;

// A stack of this thread, its own or a handler's.
struct Level {
  int operations = 0;                           // that run on it
  std::vector<std::unique_ptr<Handler>> aside;  // handlers that were run on top of it
};

struct Handler {
  Level level;
  Handler* below = nullptr;  // null: on top of the thread's own stack
  std::function<void()> run;
  std::exception_ptr error;
  bool done = false;
  bool is_alone = false;  // what it interrupted is over
  const int generation = forkGeneration();
  std::unique_ptr<Stack> stack;
  ucontext_t own{}, under{};
  Exceptions exceptions;  // of the stack that does not run
#ifdef RINGREDUCE_ASAN
  void *own_fake = nullptr, *under_fake = nullptr;
  const void* under_base = nullptr;
  size_t under_bytes = 0;
#elif defined(RINGREDUCE_TSAN)
  void *own_fiber = __tsan_create_fiber(0), *under_fiber = nullptr;
  ~Handler() { __tsan_destroy_fiber(own_fiber); }
#endif
};

struct Stacks {
  Level own;
  Handler* running = nullptr;
  std::unique_ptr<Stack> spare;
  Level& level() { return running ? running->level : own; }
};

thread_local Stacks stacks;

// A handler may have changed the signals that its thread blocks, which belongs to no stack.
void changeStack(ucontext_t& from, ucontext_t& to) {
  pthread_sigmask(SIG_SETMASK, nullptr, &to.uc_sigmask);
  swapcontext(&from, &to);
}

// Lets a handler run until it ends or steps aside.
void goOn(Handler& handler) {
  stacks.running = &handler;
  exchangeExceptions(handler.exceptions);
#ifdef RINGREDUCE_ASAN
  __sanitizer_start_switch_fiber(&handler.under_fake, handler.stack->base(), kStackBytes);
#elif defined(RINGREDUCE_TSAN)
  handler.under_fiber = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(handler.own_fiber, 0);
#endif
  changeStack(handler.under, handler.own);
#ifdef RINGREDUCE_ASAN
  __sanitizer_finish_switch_fiber(handler.under_fake, nullptr, nullptr);
#endif
  exchangeExceptions(handler.exceptions);
  stacks.running = handler.below;
}

// In a handler: lets the stack below go on.
void goBelow(Handler& handler) {
#ifdef RINGREDUCE_ASAN
  __sanitizer_start_switch_fiber(handler.done ? nullptr : &handler.own_fake, handler.under_base,
                                 handler.under_bytes);
#elif defined(RINGREDUCE_TSAN)
  __tsan_switch_to_fiber(handler.under_fiber, 0);
#endif
  changeStack(handler.own, handler.under);
#ifdef RINGREDUCE_ASAN
  __sanitizer_finish_switch_fiber(handler.own_fake, &handler.under_base, &handler.under_bytes);
#endif
}

void runHandler() {
  Handler& handler = *stacks.running;
#ifdef RINGREDUCE_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &handler.under_base, &handler.under_bytes);
#endif
  try {
    handler.run();
  } catch (...) {
    handler.error = std::current_exception();
  }
  handler.done = true;
  goBelow(handler);
}

void keepStack(std::unique_ptr<Handler> handler) {
  if (!stacks.spare) stacks.spare = std::move(handler->stack);
}

}  // namespace

OperationHere::OperationHere() {
  ++stacks.level().operations;
}

OperationHere::~OperationHere() {
  --stacks.level().operations;
}

void runAside(std::function<void()> run) {
  Level& level = stacks.level();
  if (level.operations == 0) return run();
  auto stack = stacks.spare ? std::move(stacks.spare) : Stack::make();
  if (!stack) return run();  // it cannot step aside then
  auto handler = std::make_unique<Handler>();
  handler->below = stacks.running;
  handler->run = std::move(run);
  handler->stack = std::move(stack);
  getcontext(&handler->own);
  handler->own.uc_stack = {.ss_sp = handler->stack->base(), .ss_flags = 0, .ss_size = kStackBytes};
  makecontext(&handler->own, &runHandler, 0);
  goOn(*handler);
  if (!handler->done) {
    level.aside.push_back(std::move(handler));
    return;
  }
  const std::exception_ptr error = std::move(handler->error);
  keepStack(std::move(handler));
  if (error) std::rethrow_exception(error);
}

void stepAside() {
  const Handler* handler = stacks.running;
  // In a child that the handler forked, what lies below is the parent's.
  if (!handler || handler->is_alone || handler->generation != forkGeneration()) return;
  goBelow(*stacks.running);
}

bool haveAsides() {
  return !stacks.level().aside.empty();
}

void finishAsides() {
  std::vector<std::unique_ptr<Handler>>& aside = stacks.level().aside;
  std::exception_ptr error;
  while (!aside.empty()) {
    auto handler = std::move(aside.back());
    aside.pop_back();
    handler->is_alone = true;
    goOn(*handler);
    if (!error) error = std::move(handler->error);
    keepStack(std::move(handler));
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace ringreduce
