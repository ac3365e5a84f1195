// The thread that looks for lost ranks and aborts torch's NCCL.
#include "torch/inner_nccl.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <system_error>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/limits.h"
#include "base/text.h"
#include "torch/errors.h"

namespace ringreduce {
namespace {

// Between two looks: at first, and twice as long each time, up to this.
constexpr std::chrono::milliseconds kRound{20}, kLongRound{640};

// A Work of NCCL's, for which the group's error comes first.
class InnerWork final : public c10d::Work {
 public:
  InnerWork(int rank, c10::intrusive_ptr<c10d::Work> work, const FailedGroup& failed)
      : c10d::Work(rank, work->retrieveOpType()), work_(std::move(work)), failed_(failed) {}

  bool isCompleted() override { return failure() || work_->isCompleted(); }
  bool isSuccess() const override { return !failure() && work_->isSuccess(); }
  std::exception_ptr exception() const override {
    const std::exception_ptr error = failure();
    return error ? error : work_->exception();
  }
  int sourceRank() const override { return work_->sourceRank(); }
  std::vector<at::Tensor> result() override { return work_->result(); }
  bool wait(std::chrono::milliseconds timeout) override {
    const bool done = failed_.explain([&] { return work_->wait(timeout); });
    failed_.check();
    unregister(this);
    return done;
  }
  void synchronize() override {
    failed_.explain([&] { work_->synchronize(); });
    unregister(this);
  }
  void abort() override { work_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return work_->getFuture(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override {
    return work_->getFutureResult();
  }
  uint64_t getSequencenumber() const override { return work_->getSequencenumber(); }
  float getDuration() const override { return work_->getDuration(); }

 private:
  std::exception_ptr failure() const {
    try {
      failed_.check();
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

  const c10::intrusive_ptr<c10d::Work> work_;
  const FailedGroup failed_;
};

}  // namespace

void FailedGroup::check() const {
  const auto group = group_.lock();
  if (!group || !group->failed()) return;
  observer_->noteFailure(observed_group_);
  translated([&] { group->checkHealth(); });
}

void FailedGroup::awaitFailure() const {
  for (const Nanos end = now() + limits::kVerdict; now() < end;) {
    const auto group = group_.lock();
    if (!group || group->failed()) return;
    std::this_thread::sleep_for(kRound);
  }
}

InnerNccl::InnerNccl(BackendPtr nccl, const std::shared_ptr<Group>& group,
                     std::shared_ptr<Observer> observer)
    : c10d::Backend(nccl->getRank(), nccl->getSize()),
      nccl_(std::move(nccl)),
      failed_(group, std::move(observer)),
      pause_(kRound) {
  try {
    watching_ = std::thread([this] { watch(); });
  } catch (const std::system_error& error) {
    throw Error(Failure::kSetup, noThread("that watches the ranks for NCCL", error));
  }
  pthread_setname_np(watching_.native_handle(), "ringreduce-nccl");
}

InnerNccl::~InnerNccl() {
  stopWatching();
}

InnerNccl::WorkPtr InnerNccl::wrapped(WorkPtr work) const {
  if (!work) return work;
  return c10::make_intrusive<InnerWork>(rank_, std::move(work), failed_);
}

void InnerNccl::watch() {
  Nanos lost_since = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    const auto pause = lost_since != 0 ? kRound : pause_;
    pause_ = std::min(2 * pause, kLongRound);
    changed_.wait_for(lock, pause, [&] { return stopping_ || pause_ < pause; });
    if (stopping_) return;
    lock.unlock();
    const auto group = failed_.group();
    if (!group) return;
    if (!group->failed()) {
      const std::shared_ptr<Epoch> epoch = group->epoch();
      const std::vector<PeerState> states = epoch->peers().states();
      const auto lost = std::ranges::find_if(states, [](const PeerState& state) {
        return state.isLost() && state.declared == Declared::kHere;
      });
      if (lost == states.end())
        lost_since = 0;
      else if (lost_since == 0)
        lost_since = now();
      else if (now() - lost_since >= limits::kLastWork)
        try {
          epoch->arbiter->failLost(static_cast<int>(lost - states.begin()),
                                   "while calls by NCCL may have been under way");
        } catch (const Error&) {
          // Calls and Works raise it.
        }
    }
    if (group->failed()) return abortOnce();
    lock.lock();
  }
}

// When a call begins.  A pause that is as short already goes on.
void InnerNccl::lookOften() {
  const std::lock_guard lock(mutex_);
  if (std::exchange(pause_, kRound) > 2 * kRound) changed_.notify_all();
}

void InnerNccl::abortOnce() {
  std::call_once(aborted_, [&] {
    try {
      nccl_->abort();
    } catch (const std::exception& error) {
      log("rank " + std::to_string(rank_) + " could not abort NCCL: " + error.what());
    }
  });
}

void InnerNccl::stopWatching() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (watching_.joinable()) watching_.join();
}

void InnerNccl::abort() {
  abortOnce();
}

// With a rank that is gone, NCCL would wait for calls that never end.
void InnerNccl::shutdown() {
  stopWatching();
  const auto group = failed_.group();
  if (group && group->failed()) return abortOnce();
  nccl_->shutdown();
}

}  // namespace ringreduce
