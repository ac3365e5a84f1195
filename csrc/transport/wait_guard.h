// How long a wait spins before it sleeps, and what it looks after meanwhile: a WaitGuard, which the
// group implements (health/arbiter.h).
#pragma once

#include <cstdint>
#include <string>

#include "base/clock.h"
#include "base/op_signature.h"
#include "base/peer_state.h"

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

// Bounds how late a lost rank, a deadline or Ctrl-C is noticed.
inline constexpr Nanos kLongestSleep = 20 * kMillisecond;

// How long to spin, and then to yield the core, before sleeping.  Spinning reacts fastest; yielding
// lets another rank on the same core run, and costs little if there is none.
struct Patience {
  Nanos spin = 0;
  Nanos yield = 0;
  Nanos sleep = kLongestSleep;  // at a time
};

class WaitGuard {
 public:
  virtual ~WaitGuard() = default;

  // Whether the group has failed.  Cheap enough for a spin loop.
  virtual bool failed() const = 0;

  // Called every few milliseconds by a wait for `rank`.  Throws if the group has failed, the
  // deadline has passed, or the rank is gone while `ready` is still false.
  virtual void poll(int rank, Ready ready) = 0;

  // Called by a wait over a transport in which nothing has moved for a while.  Throws if any rank
  // has been lost for a while and `ready` is still false: the awaited rank may be waiting for the
  // lost one.
  virtual void idle(Ready) {}

  // Called at the first data of `rank` in an operation.  Throws if it announced another one.
  virtual void verify(int rank) = 0;

  // The same over a transport, with the signature that it sent.
  virtual void verify(int rank, const OpSignature& theirs) = 0;

  virtual PeerState stateOf(int rank) const = 0;

  // Called when no more bytes can be sent to `rank` or received from it.  Throws.
  [[noreturn]] virtual void broken(int rank, const std::string& how) = 0;

  // Called when `sender` sends `sent` elements to `receiver`, which expects `expected`.  Throws.
  [[noreturn]] virtual void disagree(int sender, int receiver, uint64_t sent,
                                     uint64_t expected) = 0;
};

}  // namespace ringreduce
