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

// Bounds how late a death, a deadline or Ctrl-C is noticed.
inline constexpr Nanos kLongestSleep = 20 * kMillisecond;

// How long to spin, and then how long to yield the core again and again, before sleeping.  Spinning
// notices soonest; yielding lets another rank run that shares the core, and costs little if none
// does.
struct Patience {
  Nanos spin = 0;
  Nanos yield = 0;
  Nanos sleep = kLongestSleep;  // at a time
};

class WaitGuard {
 public:
  virtual ~WaitGuard() = default;

  // Whether the group has failed; cheap enough to be asked in a spin loop.
  virtual bool failed() const = 0;

  // Called every few milliseconds by a wait for something that `rank` must do.  Throws if the group
  // has failed, the deadline has passed, or the rank is gone and `ready` is false even so.
  virtual void poll(int rank, Ready ready) = 0;

  // Called now and then by a wait between ranks that share no memory, in which nothing has moved
  // for a while.  Throws if some rank has been lost for a while, and `ready` is false even so:
  // whoever is awaited may be well, but waits for that one.
  virtual void idle(Ready) {}

  // Called when `rank` is first heard of in an operation.  Throws if it announced another one.
  virtual void verify(int rank) = 0;

  // The same for ranks that share no memory: this is what it announced.
  virtual void verify(int rank, const OpSignature& theirs) = 0;

  virtual PeerState stateOf(int rank) const = 0;

  // Called when no more bytes can be sent to `rank`, or will come from it.  Throws.
  [[noreturn]] virtual void broken(int rank, const std::string& how) = 0;

  // Called when `sender` gives `sent` elements to `receiver`, which expects `expected`.  Throws.
  [[noreturn]] virtual void disagree(int sender, int receiver, uint64_t sent,
                                     uint64_t expected) = 0;
};

}  // namespace ringreduce
