// The spin, the yields and the futex.
#include "transport/shm/wait.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>

namespace ringreduce {

// Not FUTEX_PRIVATE: the word is shared between processes.
void sleepOn(uint32_t& word, uint32_t value, Nanos longest) {
  const timespec limit{.tv_sec = longest / kSecond, .tv_nsec = longest % kSecond};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &limit, nullptr, 0);
}

void wakeSleeper(uint32_t& word) {
  // The exchange leaves the system call to one of several callers.
  if (std::atomic_ref(word).exchange(0, std::memory_order_seq_cst))
    syscall(SYS_futex, &word, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

void wake(RankPage& page) {
  wakeSleeper(page.wake_word);
}

void Waiter::waitFor(int rank, Ready ready) {
  const auto spins = [&] {
    for (int i = 0; i < 32; ++i) {
      if (ready()) return true;
      pause();
    }
    return false;
  };
  if (patience_.spin > 0 && spins()) return;  // most waits: they do without the clock
  const Nanos start = now();
  while (now() - start < patience_.spin && !guard_.failed())
    if (spins()) return;
  while (now() - start < patience_.spin + patience_.yield && !guard_.failed()) {
    if (ready()) return;
    sched_yield();
  }
  std::atomic_ref word(own_.wake_word);
  Nanos next_poll = 0;  // at once: this wait is long already
  for (;;) {
    word.store(wakeWordFor(rank), std::memory_order_seq_cst);
    if (!ready() && !guard_.failed()) sleepOn(own_.wake_word, wakeWordFor(rank), patience_.sleep);
    word.store(0, std::memory_order_relaxed);
    if (ready()) return;
    if (now() >= next_poll || guard_.failed()) {
      guard_.poll(rank, ready);
      next_poll = now() + kLongestSleep / 2;
    }
  }
}

}  // namespace ringreduce
