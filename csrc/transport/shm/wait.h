// Waiting for a flag: spin, then yield, then sleep on a futex.
//
// A waiter sets its page's wake word, looks at the flag once more, and sleeps.  A publisher stores
// its flag and then looks at the wake word.  Both are sequentially consistent, so one of them sees
// the other.  So are the accesses to the failure of the group (health/verdict.h).  A sleep ends
// after kLongestSleep in any case, to check for dead processes, deadlines and Ctrl-C:
// WaitGuard::poll, which is Arbiter::poll (health/arbiter.cc).
#pragma once

#include "base/clock.h"
#include "transport/shm/page.h"
#include "transport/wait_guard.h"

namespace ringreduce {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // waits about as long as PAUSE; YIELD is often a no-op
#endif
}

// Wakes the owner of the page, if it sleeps.
void wake(RankPage& page);
// The same after rank `me` has stored a flag: only if the owner sleeps and waits for `me`.  Costs
// one load otherwise.
template <class Rules = HostRules>
void wakeIfWaiting(RankPage& page, int me) {
  if (Rules::kWakes &&
      std::atomic_ref(page.wake_word).load(std::memory_order_seq_cst) == wakeWordFor(me))
    wake(page);
}

// Sleeps while `word` has this value, no longer than `longest`.
void sleepOn(uint32_t& word, uint32_t value, Nanos longest);
// Wakes the thread that sleeps on `word`, and sets it to 0.
void wakeSleeper(uint32_t& word);

class Waiter {
 public:
  // `own` is the page of the waiting rank; one thread at a time may wait on it.
  Waiter(RankPage& own, WaitGuard& guard) : own_(own), guard_(guard) {}

  void setPatience(Patience patience) { patience_ = patience; }

  // Waits until ready() is true; `rank` must make it so.  Passes on exceptions of the WaitGuard.
  template <class F>
  void until(int rank, F&& ready) {
    if (!ready()) waitFor(rank, Ready(ready));
  }

 private:
  void waitFor(int rank, Ready ready);

  RankPage& own_;
  WaitGuard& guard_;
  Patience patience_;
};

}  // namespace ringreduce
