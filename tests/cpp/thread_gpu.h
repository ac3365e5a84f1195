// A rank of a real group whose GPU is a thread: its stream runs the direct schedule on the words,
// with the steps and the element loops that a GPU uses, and a real watchdog looks after it.  The
// memory that ranks share is the host's, so ranks may be threads or processes.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "cuda/communicator/host_ranks.h"
#include "cuda/kernels/stream_kernels.h"
#include "group/exchange_fds.h"
#include "host_block.h"

namespace thread_gpu {

using namespace ringreduce;
using namespace ringreduce::cuda;

// Runs what is put into it, in order, in a thread of its own.
class Stream {
 public:
  Stream() : thread_([this] { run(); }) {}
  ~Stream() {
    put({});
    thread_.join();
  }
  // Returns how many there will have been with it.
  uint64_t put(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
    changed_.notify_one();
    return ++put_;
  }
  bool isDone(uint64_t ticket) const { return done_.load(std::memory_order_acquire) >= ticket; }

 private:
  void run() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !queue_.empty(); });
      const auto work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      if (!work) return;
      work();
      done_.fetch_add(1, std::memory_order_release);
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  uint64_t put_ = 0;
  std::atomic<uint64_t> done_{0};
  std::thread thread_;
};

// A rank whose GPU is a thread.
class Rank {
 public:
  static constexpr size_t kElements = 4096;

  explicit Rank(Group& group)
      : group_(group),
        pages_(group, sizeof(HostState)),
        staging_(group, kHalves * kElements * sizeof(float)),
        watchdog_(group, std::make_unique<HostRanks>(group, states())) {}

  HostState& state(int r) { return *reinterpret_cast<HostState*>(pages_.at(r)); }
  HostState& own() { return state(group_.rank()); }
  Watchdog& watchdog() { return watchdog_; }
  Stream& stream() { return stream_; }

  // In place, through the staging memory, as host_communicator.cc would.
  uint64_t allReduce(float* data, size_t count, Nanos timeout, ReduceOp op = ReduceOp::kSum,
                     Watchdog::Label label = {}) {
    const uint64_t number = watchdog_.announce({.count = count,
                                                .kind = Kind::kAllReduce,
                                                .dtype = DType::kFloat32,
                                                .op = static_cast<uint8_t>(op)});
    uint64_t ticket = 0;
    for (const ScheduleStep& step : directSchedule(group_.rank(), group_.size(), {{0, count}},
                                                   schedules_++, count > 512, true))
      ticket = stream_.put([this, step, data, count, op] { perform(step, data, count, op); });
    watchdog_.track(timeout, [this, ticket] { return stream_.isDone(ticket); }, std::move(label));
    return number;
  }

 private:
  using E = Element<DType::kFloat32>;

  std::vector<HostState*> states() {
    std::vector<HostState*> all;
    for (int r = 0; r < group_.size(); ++r) all.push_back(&state(r));
    return all;
  }

  void perform(const ScheduleStep& step, float* data, size_t count, ReduceOp op) {
    using Do = ScheduleStep::Do;
    host::Team team(1);
    host::Block block(team, 0);
    uint32_t& word = state(waiterOf(step)).words[wordIndex(step, group_.size())].word;
    const auto set = [](uint32_t& where, uint32_t value) {
      std::atomic_ref(where).store(value, std::memory_order_release);
    };
    const Arithmetic arithmetic{combineOf(DType::kFloat32, op), op == ReduceOp::kAvg, false,
                                group_.size(), 1};
    const auto staging = [&](int r) {
      return staging_.at(r) + static_cast<size_t>(step.half) * kElements * sizeof(float);
    };
    std::byte* mine = staging(group_.rank());
    switch (step.what) {
      case Do::kBegin:
        return set(own().busy, 1);
      case Do::kStage:
        return copyIn<E>(
            block, {reinterpret_cast<std::byte*>(data), mine, count, arithmetic, &own().abort}, 0,
            1);
      case Do::kSet:
        return set(word, 1);
      case Do::kLook:  // all is staged
        return;
      case Do::kTake:
        return set(word, 0);
      case Do::kAwait:
        while (static_cast<int32_t>(std::atomic_ref(word).load(std::memory_order_acquire) - 1) < 0)
          std::this_thread::yield();
        return;
      case Do::kLead: {
        DirectCall lead{.size = group_.size(),
                        .sinks = group_.size(),
                        .chunk = Cut{count, group_.size()}.chunkSize(),
                        .begin = step.elements.begin,
                        .elements = step.elements.size,
                        .first = 0,
                        .tensors = {},
                        .arithmetic = arithmetic,
                        .abort = &own().abort};
        for (int r = 0; r < group_.size(); ++r)
          lead.tensors.input[r] = lead.tensors.output[r] = staging(r);
        return direct<E>(block, lead, block.peers(), 0, 1);
      }
      case Do::kDeliver:
        return deliver(block,
                       {mine, reinterpret_cast<std::byte*>(data), count * sizeof(float),
                        &own().abort, &own().delivered, &local_, reinterpret_cast<std::byte*>(data),
                        count * sizeof(float), poisonOf(DType::kFloat32)},
                       0, 1);
      case Do::kEnd:
        return set(own().busy, 0);
    }
  }

  Group& group_;
  HostPages pages_, staging_;
  Local local_{};
  uint64_t schedules_ = 0;
  Stream stream_;  // the watchdog asks it; it ends only once nothing waits
  Watchdog watchdog_;
};

}  // namespace thread_gpu
