// The thread, and how it sleeps until it is asked.
#include "health/pulse.h"

#include <pthread.h>

#include <csignal>
#include <system_error>

#include "base/error.h"
#include "base/text.h"
#include "transport/shm/wait.h"

namespace ringreduce {

Pulse::Pulse(RankPage& page) : page_(page) {
  // Signals are for the threads of the user's program.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    thread_ = new std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw Error(Failure::kSetup, noThread("that on_loss='continue' needs", error));
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Pulse::~Pulse() {
  if (generation_ != forkGeneration()) return;
  stopping_ = true;
  wakeSleeper(page_.pulse_wake_word);
  thread_->join();
  delete thread_;
}

void Pulse::run() {
  pthread_setname_np(pthread_self(), "ringreduce-live");
  const std::atomic_ref asleep(page_.pulse_wake_word);
  const std::atomic_ref pulses(page_.pulses);
  for (;;) {
    asleep.store(1, std::memory_order_seq_cst);
    pulses.fetch_add(1, std::memory_order_seq_cst);
    if (stopping_) return;
    sleepOn(page_.pulse_wake_word, 1, 3600 * kSecond);
  }
}

}  // namespace ringreduce
