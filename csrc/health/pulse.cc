// The thread, and how it sleeps until it is asked.
#include "health/pulse.h"

#include "base/error.h"
#include "base/text.h"
#include "base/thread.h"
#include "transport/shm/wait.h"

namespace ringreduce {

Pulse::Pulse(RankPage& page) : page_(page) {
  thread_ = new std::thread(
      startThread("ringreduce-live", "that on_loss='continue' needs", [this] { run(); }));
}

Pulse::~Pulse() {
  if (generation_ != forkGeneration()) return;
  stopping_ = true;
  wakeSleeper(page_.pulse_wake_word);
  thread_->join();
  delete thread_;
}

void Pulse::run() {
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
