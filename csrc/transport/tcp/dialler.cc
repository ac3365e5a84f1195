// The threads: started when there is something to dial, ended when there is not.
#include "transport/tcp/dialler.h"

#include <pthread.h>

#include <algorithm>
#include <csignal>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace ringreduce::net {
namespace {

// How long a connection may keep a thread that others wait for: one packet may get lost within it.
constexpr Nanos kShare = 2 * kSecond;

// Thrown through a dial that is to be tried again later.
struct GivesWay {};

}  // namespace

Dialler::Dialler(Dial dial, Nanos longest) : dial_(std::move(dial)), longest_(longest) {}

void Dialler::call(int to, int lane, Taken taken) {
  if (generation_ != forkGeneration()) return;
  std::unique_lock lock(mutex_);
  if (stopping_) return;
  calls_.push_back({.to = to, .lane = lane, .taken = std::move(taken)});
  if (alive_ >= kMostThreads) return;
  joinEnded();
  // Signals are for the threads of the user's program.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  NotMade error;
  try {
    threads_->emplace_back([this] { run(); });
    ++alive_;
  } catch (const std::system_error& thrown) {
    error = {std::string("no thread can be started to connect to it: ") + thrown.what(), true};
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error.why.empty() || alive_ > 0) return;  // one of those that are alive takes it
  const Call refused = std::move(calls_.back());
  calls_.pop_back();
  lock.unlock();
  refused.taken(Socket(), error);
}

// They have left the mutex, so none is waited for that needs it.
void Dialler::joinEnded() {
  std::erase_if(*threads_, [this](std::thread& thread) {
    const bool ended = std::ranges::count(ended_, thread.get_id()) > 0;
    if (ended) thread.join();
    return ended;
  });
  ended_.clear();
}

void Dialler::stop() {
  if (generation_ != forkGeneration()) return;
  std::vector<std::thread> threads;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    if (threads_) threads.swap(*threads_);
    delete std::exchange(threads_, nullptr);
  }
  for (std::thread& thread : threads) thread.join();
  calls_.clear();
}

bool Dialler::isStopping() {
  const std::lock_guard lock(mutex_);
  return stopping_;
}

bool Dialler::othersWait() {
  const std::lock_guard lock(mutex_);
  return !calls_.empty();
}

Socket Dialler::dial(Call& call) {
  if (call.until == 0) call.until = deadlineIn(longest_);
  const Nanos share = deadlineIn(kShare);
  Socket socket = dial_(call.to, call.lane, [&] {
    if (isStopping()) throw Error(Failure::kAborted, "nobody wants this connection any more");
    const Nanos time = now();
    if (time >= call.until) throw Error(Failure::kSetup, "it does not answer");
    if (time >= share && othersWait()) throw GivesWay();
  });
  if (!socket) throw Error(Failure::kSetup, "no connection was made");
  return socket;
}

void Dialler::run() {
  pthread_setname_np(pthread_self(), "ringreduce-dial");
  std::unique_lock lock(mutex_);
  while (!stopping_ && !calls_.empty()) {
    Call call = std::move(calls_.front());
    calls_.pop_front();
    lock.unlock();
    Socket socket;
    NotMade error;
    bool again = false;
    try {
      socket = dial(call);
    } catch (const GivesWay&) {
      again = true;
    } catch (const OwnTrouble& thrown) {
      error = {thrown.what(), true};
    } catch (const std::exception& thrown) {
      error.why = thrown.what();
    } catch (...) {
      error.why = "an error of an unknown kind";
    }
    if (!again && !isStopping()) call.taken(std::move(socket), error);
    lock.lock();
    if (again) calls_.push_back(std::move(call));
  }
  --alive_;
  ended_.push_back(std::this_thread::get_id());
}

}  // namespace ringreduce::net
