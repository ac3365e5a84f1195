// A queue and the thread that empties it.
#include "cuda/memory/closer.h"

#include <deque>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "base/fd.h"
#include "base/thread.h"

namespace ringreduce::cuda {
namespace {

struct Queue {
  std::mutex mutex;
  std::deque<std::function<void()>> waiting;
  bool is_emptied = false;  // by a thread
  const int generation = forkGeneration();

  void empty() {
    std::unique_lock lock(mutex);
    while (!waiting.empty()) {
      std::function<void()> close = std::move(waiting.front());
      waiting.pop_front();
      lock.unlock();
      close();
      close = nullptr;
      lock.lock();
    }
    is_emptied = false;
  }
};

}  // namespace

void closeLater(std::function<void()> close) {
  static auto* queue = new Queue;  // never destroyed: memory may be given back at exit
  if (forkGeneration() != queue->generation) {
    (void)new std::function<void()>(std::move(close));  // the parent's, as its thread is
    return;
  }
  const std::lock_guard lock(queue->mutex);
  queue->waiting.push_back(std::move(close));
  if (queue->is_emptied) return;
  queue->is_emptied = true;
  try {
    startThread("ringreduce-free", "that gives GPU memory back", [] { queue->empty(); }).detach();
  } catch (const Error& error) {
    queue->is_emptied = false;  // the next one tries again
    log(error.what());
  }
}

}  // namespace ringreduce::cuda
