// What a wait must look after while it waits; implemented by the group (group/session.h).
#pragma once

#include <cstdint>

namespace ringreduce {

// A non-owning reference to a callable that says whether a wait is over.
class Ready {
 public:
  template <class F>
  Ready(F& f) : object_(&f), call_([](void* o) { return (*static_cast<F*>(o))(); }) {}
  bool operator()() const { return call_(object_); }

 private:
  void* object_;
  bool (*call_)(void*);
};

class Watch {
 public:
  virtual ~Watch() = default;

  // Whether the group has failed; cheap enough to be asked in a spin loop.
  virtual bool failed() const = 0;

  // Called every few milliseconds by a wait for something that `rank` must do.  Throws if the group
  // has failed, the deadline has passed, or the rank is gone and `ready` is false even so.
  virtual void poll(int rank, Ready ready) = 0;

  // Called when `rank` is first heard of in an operation.  Throws if it announced another one.
  virtual void verify(int rank) = 0;

  // Called when `sender` gives `sent` elements to `receiver`, which expects `expected`.  Throws.
  [[noreturn]] virtual void disagree(int sender, int receiver, uint64_t sent,
                                     uint64_t expected) = 0;
};

}  // namespace ringreduce
