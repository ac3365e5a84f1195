// Waiting for a flag: spin, then yield, then sleep on a futex.
//
// A waiter marks itself as asleep in its page's wake word (`bell`) and then checks the flag again;
// a publisher stores its flag and then checks the wake words.  Both are sequentially consistent, so
// one of them sees the other.  A sleep ends after a few milliseconds in any case, to check for what
// flags do not show: a dead process, a deadline, Ctrl-C.
#pragma once

#include "base/clock.h"
#include "transport/shm/page.h"
#include "transport/wait_guard.h"

namespace ringreduce {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// Wakes the owner of the page if it sleeps.
void wake(RankPage& page);
// The same, if the owner waits for rank `me`, which has just stored a flag.  Otherwise it costs one
// load.
template <class Rules = HostRules>
void ring(RankPage& page, int me) {
  if (Rules::kWakes && std::atomic_ref(page.bell).load(std::memory_order_seq_cst) == bellFor(me))
    wake(page);
}

// Sleeps while `bell` has this value, at most `longest`.
void sleepOn(uint32_t& bell, uint32_t value, Nanos longest);
// Wakes the thread that sleeps on `bell`, and sets it to 0.
void ringBell(uint32_t& bell);

class Waiter {
 public:
  // `own` is the page of the waiting rank; one thread at a time may wait on it.
  Waiter(RankPage& own, WaitGuard& watch) : own_(own), watch_(watch) {}

  void setPatience(Patience patience) { patience_ = patience; }

  // Waits until ready() is true; `rank` must make it so.  Throws what the WaitGuard throws.
  template <class F>
  void until(int rank, F&& ready) {
    if (!ready()) waitFor(rank, Ready(ready));
  }

 private:
  void waitFor(int rank, Ready ready);

  RankPage& own_;
  WaitGuard& watch_;
  Patience patience_;
};

}  // namespace ringreduce
