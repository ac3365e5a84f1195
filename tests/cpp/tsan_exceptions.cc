// Tells ThreadSanitizer what orders the owners of an exception; part of every test in its builds.
//
// An exception_ptr and a catch handler each own the exception, and the last one destroys it, maybe
// in another thread than the one that has looked at it.  How many there are is counted inside of
// libstdc++, which is not instrumented, so ThreadSanitizer would see a look and a deletion with
// nothing between them.  Here an owner that lets go holds a mutex.
#include <dlfcn.h>
#include <pthread.h>

extern "C" {

void __cxa_end_catch();

// std::exception_ptr::_M_release()
void letGo(void* pointer) __asm__("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
}

namespace {

// Recursive, since the destructor of an exception may catch another.
pthread_mutex_t owners = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

struct Lock {
  Lock() { pthread_mutex_lock(&owners); }
  ~Lock() { pthread_mutex_unlock(&owners); }
};

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

void __cxa_end_catch() {
  static auto* const real = next<void()>("__cxa_end_catch");
  const Lock lock;
  real();
}

void letGo(void* pointer) {
  static auto* const real =
      next<void(void*)>("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
  const Lock lock;
  real(pointer);
}
