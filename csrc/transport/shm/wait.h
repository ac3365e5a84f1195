// Waiting for a flag: spin, then yield, then sleep on a futex.
//
// A waiter that sleeps says so in its page's bell and then looks once more; a publisher stores its
// flag and then looks at the bells.  Both are sequentially consistent, so one of them sees the
// other. A sleep ends after a few milliseconds in any case, to look after what flags cannot tell: a
// dead process, a deadline, Ctrl-C.
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

// Wakes the rank whose page this is, if it sleeps.
void wake(RankPage& page);
// The same for rank `me`, which has just stored a flag: if that rank sleeps and waits for `me`.
// Costs one load otherwise.
template <class Rules = HostRules>
void ring(RankPage& page, int me) {
  if (Rules::kWakes && std::atomic_ref(page.bell).load(std::memory_order_seq_cst) == bellFor(me))
    wake(page);
}

// Sleeps while `bell` has this value, no longer than `longest`.
void sleepOn(uint32_t& bell, uint32_t value, Nanos longest);
// Wakes who sleeps on `bell`, which is 0 afterwards.
void ringBell(uint32_t& bell);

class Waiter {
 public:
  // `own` is the page of the rank that waits; one thread at a time may wait on it.
  Waiter(RankPage& own, WaitGuard& watch) : own_(own), watch_(watch) {}

  void setPatience(Patience patience) { patience_ = patience; }

  // Returns once ready() is true.  `rank` is who must make it so.  Throws what the WaitGuard
  // throws.
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
