// The loop: epoll, an eventfd that wakes it, and a sorted map of timers.
#include "transport/tcp/reactor.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "base/fd.h"
#include "base/thread.h"

namespace ringreduce::net {
namespace {

class Loop final : public Reactor {
 public:
  Loop();
  // Starts the thread, which keeps `self` alive.
  void start(std::shared_ptr<Loop> self);
  // Ends the thread, after the last user is gone.
  void leave();

  void watch(int fd, uint32_t events, Ready ready) override;
  void change(int fd, uint32_t events) override;
  void forget(int fd) override;
  Timer at(Nanos when, std::function<void()> then) override;
  void cancel(Timer timer) override;
  void soon(std::function<void()> then) override;
  void run(const std::function<void()>& then) override;
  bool isItsThread() const override { return current_ == this; }

 private:
  using Id = uint64_t;  // of a watch or a timer; unlike descriptors, never used twice
  static constexpr Id kWakeup = 0;
  struct Watched {
    int fd;
    Ready ready;
  };
  using Lock = std::unique_lock<std::mutex>;

  bool isInherited() const { return generation_ != forkGeneration(); }
  void loop();
  int wait(std::array<epoll_event, 64>& events);
  bool runQueue();
  void runTimers();
  void serve(Id id, uint32_t events);
  bool call(Id id, std::function<void()> body);
  void wake(Lock& lock);
  void awaitEnd(Id id, Lock& lock);

  static thread_local Loop* current_;

  const int generation_ = forkGeneration();
  Fd epoll_, wakeup_;
  std::thread* thread_ = nullptr;  // never deleted in a child, where there is no such thread

  std::mutex mutex_;  // of all below
  std::condition_variable ended_;
  bool stopping_ = false, woken_ = false, failed_ = false;
  Id last_id_ = kWakeup, running_ = kWakeup;
  std::unordered_map<int, Id> ids_;
  std::unordered_map<Id, std::shared_ptr<Watched>> watched_;
  std::map<std::pair<Nanos, Id>, std::shared_ptr<std::function<void()>>> timers_;
  std::unordered_map<Id, Nanos> times_;
  std::deque<std::function<void()>> queue_;
};

thread_local Loop* Loop::current_ = nullptr;

Loop::Loop()
    : epoll_(epoll_create1(EPOLL_CLOEXEC)), wakeup_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!epoll_ || !wakeup_) throwErrno(Failure::kSetup, "cannot wait for sockets (epoll, eventfd)");
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWakeup;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wakeup_.get(), &event) != 0)
    throwErrno(Failure::kSetup, "cannot wait for sockets (epoll_ctl)");
}

void Loop::start(std::shared_ptr<Loop> self) {
  thread_ = new std::thread(startThread("ringreduce-net", "for sockets", [self = std::move(self)] {
    current_ = self.get();
    self->loop();
    current_ = nullptr;
  }));
}

void Loop::leave() {
  if (isInherited()) return;
  {
    Lock lock(mutex_);
    stopping_ = true;
    wake(lock);
  }
  if (isItsThread())
    thread_->detach();
  else
    thread_->join();
  delete std::exchange(thread_, nullptr);
}

// ---- from other threads

void Loop::watch(int fd, uint32_t events, Ready ready) {
  if (isInherited()) return;
  std::shared_ptr<Watched> stale;  // its descriptor was closed but not forgotten
  {
    const Lock lock(mutex_);
    const Id id = ++last_id_;
    epoll_event event{};
    event.events = events;
    event.data.u64 = id;
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
      throwErrno(Failure::kSetup, "cannot watch a socket (epoll_ctl)");
    if (const auto old = ids_.find(fd); old != ids_.end())
      if (auto found = watched_.extract(old->second)) stale = std::move(found.mapped());
    ids_[fd] = id;
    watched_.emplace(id, std::make_shared<Watched>(Watched{fd, std::move(ready)}));
  }
}

void Loop::change(int fd, uint32_t events) {
  if (isInherited()) return;
  const Lock lock(mutex_);
  const auto found = ids_.find(fd);
  if (found == ids_.end()) return;
  epoll_event event{};
  event.events = events;
  event.data.u64 = found->second;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event) != 0)
    throwErrno(Failure::kSetup, "cannot watch a socket (epoll_ctl)");
}

void Loop::forget(int fd) {
  if (isInherited()) return;
  std::shared_ptr<Watched> forgotten;  // destroyed without the lock
  Lock lock(mutex_);
  const auto found = ids_.find(fd);
  if (found == ids_.end()) return;
  const Id id = found->second;
  ids_.erase(found);
  if (auto node = watched_.extract(id)) forgotten = std::move(node.mapped());
  // Fails only if it was closed; then epoll has dropped it.
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  awaitEnd(id, lock);
  lock.unlock();
}

Reactor::Timer Loop::at(Nanos when, std::function<void()> then) {
  if (isInherited()) return 0;
  Lock lock(mutex_);
  const Id id = ++last_id_;
  const auto entry =
      timers_.emplace(std::pair(when, id), std::make_shared<std::function<void()>>(std::move(then)))
          .first;
  times_.emplace(id, when);
  if (entry == timers_.begin()) wake(lock);
  return id;
}

void Loop::cancel(Timer timer) {
  if (isInherited() || timer == 0) return;
  std::shared_ptr<std::function<void()>> cancelled;  // destroyed without the lock
  Lock lock(mutex_);
  if (const auto time = times_.find(timer); time != times_.end()) {
    const auto found = timers_.find({time->second, timer});
    cancelled = std::move(found->second);
    timers_.erase(found);
    times_.erase(time);
  }
  awaitEnd(timer, lock);
  lock.unlock();
}

void Loop::soon(std::function<void()> then) {
  if (isInherited()) return;
  Lock lock(mutex_);
  queue_.push_back(std::move(then));
  wake(lock);
}

void Loop::run(const std::function<void()>& then) {
  if (isInherited()) return;
  if (isItsThread()) return then();
  struct Done {
    std::mutex mutex;
    std::condition_variable changed;
    bool over = false;
    std::exception_ptr error;
  } done;
  soon([&] {
    std::exception_ptr error;
    try {
      then();
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(done.mutex);  // `done` must live until it is unlocked
    done.error = std::move(error);
    done.over = true;
    done.changed.notify_all();
  });
  std::unique_lock lock(done.mutex);
  done.changed.wait(lock, [&] { return done.over; });
  if (done.error) std::rethrow_exception(done.error);
}

// ---- the thread

void Loop::wake(Lock&) {
  if (isItsThread() || woken_) return;
  woken_ = true;
  const uint64_t one = 1;
  // The counter cannot be full: it is read before the next write.
  while (::write(wakeup_.get(), &one, sizeof one) < 0 && errno == EINTR) {
  }
}

// Waits until this callback does not run, unless the caller is the callback itself.
void Loop::awaitEnd(Id id, Lock& lock) {
  if (!isItsThread()) ended_.wait(lock, [&] { return running_ != id; });
}

void Loop::loop() {
  std::array<epoll_event, 64> events;
  for (;;) {
    const int ready = wait(events);
    for (int i = 0; i < ready; ++i) {
      const epoll_event& event = events[static_cast<size_t>(i)];
      if (event.data.u64 != kWakeup) serve(event.data.u64, event.events);
    }
    runTimers();
    if (!runQueue()) return;
  }
}

int Loop::wait(std::array<epoll_event, 64>& events) {
  int longest = -1;
  {
    const Lock lock(mutex_);
    if (stopping_ || !queue_.empty()) {
      longest = 0;
    } else if (!timers_.empty()) {
      const Nanos left =
          std::clamp<Nanos>(timers_.begin()->first.first - now(), 0, ProcessClock::kLongestGap / 2);
      longest = static_cast<int>(left / kMillisecond + (left % kMillisecond != 0));
    }
  }
  const int ready =
      epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), longest);
  const int error = errno;
  Lock lock(mutex_);
  if (ready >= 0) {
    for (int i = 0; i < ready; ++i)
      if (events[static_cast<size_t>(i)].data.u64 == kWakeup) {
        uint64_t count;
        while (::read(wakeup_.get(), &count, sizeof count) < 0 && errno == EINTR) {
        }
        woken_ = false;
      }
    return ready;
  }
  if (error == EINTR) return 0;
  // The program has closed our descriptor.  Sockets are not served any more, but calls to this
  // reactor must not hang.
  if (!std::exchange(failed_, true))
    log("cannot wait for sockets: " + std::system_category().message(error) +
        "; has the program closed descriptors that are not its own?");
  ended_.wait_for(lock, std::chrono::milliseconds(10));
  return 0;
}

// False if the loop is to end.
bool Loop::runQueue() {
  std::deque<std::function<void()>> queue;
  {
    const Lock lock(mutex_);
    if (queue_.empty()) return !stopping_;
    queue.swap(queue_);
  }
  for (std::function<void()>& then : queue) call(kWakeup, std::move(then));
  return true;
}

void Loop::runTimers() {
  // Only timers that are due now: one that sets itself again must not delay sockets.
  const Nanos time = now();
  for (;;) {
    std::shared_ptr<std::function<void()>> then;
    Id id = 0;
    {
      const Lock lock(mutex_);
      if (timers_.empty() || timers_.begin()->first.first > time) return;
      id = timers_.begin()->first.second;
      then = std::move(timers_.begin()->second);
      timers_.erase(timers_.begin());
      times_.erase(id);
      running_ = id;
    }
    call(id, [then = std::move(then)] { (*then)(); });
  }
}

void Loop::serve(Id id, uint32_t events) {
  std::shared_ptr<Watched> watched;
  int fd = -1;
  {
    const Lock lock(mutex_);
    const auto found = watched_.find(id);
    if (found == watched_.end()) return;  // forgotten since
    watched = found->second;
    fd = watched->fd;
    running_ = id;
  }
  if (call(id, [events, watched = std::move(watched)] { watched->ready(events); })) return;
  std::shared_ptr<Watched> failed;
  const Lock lock(mutex_);
  if (const auto found = ids_.find(fd); found != ids_.end() && found->second == id) {
    ids_.erase(found);
    if (auto node = watched_.extract(id)) failed = std::move(node.mapped());
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
  }
}

// Calls the body and destroys it before awaitEnd() returns in other threads.  False if it threw.
bool Loop::call(Id id, std::function<void()> body) {
  bool fine = false;
  try {
    body();
    fine = true;
  } catch (const std::exception& error) {
    log(std::string("the thread for sockets met an error: ") + error.what());
  } catch (...) {
    log("the thread for sockets met an error of an unknown kind");
  }
  body = nullptr;
  if (id != kWakeup) {
    const Lock lock(mutex_);
    running_ = kWakeup;
    ended_.notify_all();
  }
  return fine;
}

constinit PerProcess<Reactor> reactor_of_process;

}  // namespace

std::shared_ptr<Reactor> Reactor::shared() {
  return reactor_of_process.get([] {
    auto loop = std::make_shared<Loop>();
    loop->start(loop);
    Loop* raw = loop.get();
    // PerProcess's weak pointer keeps the deleter alive, which must not keep the loop's
    // descriptors.
    return std::shared_ptr<Reactor>(raw, [loop = std::move(loop)](Reactor*) mutable {
      const std::shared_ptr<Loop> last = std::move(loop);
      last->leave();
    });
  });
}

bool Reactor::waitUntil(Nanos longest, const std::function<bool()>& done) {
  const Nanos limit = deadlineIn(longest);
  for (Nanos nap = 100 * kMicrosecond;; nap = std::min(2 * nap, 5 * kMillisecond)) {
    bool over = true;
    run([&] { over = done(); });
    const Nanos left = limit - now();
    if (over || left <= 0 || isItsThread()) return over;
    std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(nap, left)));
  }
}

// ---- the log

RateLimitedLog::RateLimitedLog(std::shared_ptr<Reactor> reactor, Nanos every)
    : reactor_(std::move(reactor)), every_(every), generation_(forkGeneration()) {}

RateLimitedLog::~RateLimitedLog() {
  if (generation_ != forkGeneration()) return;  // a forked child has its own
  reactor_->cancel(timer_);
  report();
}

void RateLimitedLog::add(const std::string& text) {
  if (timer_ != 0) {
    ++count_;
    latest_ = text;
    return;
  }
  log(text);
  timer_ = reactor_->at(deadlineIn(every_), [this] {
    timer_ = 0;
    report();
  });
}

void RateLimitedLog::report() {
  if (const size_t more = std::exchange(count_, 0))
    log(more == 1
            ? latest_
            : latest_ + " (and " + std::to_string(more - 1) + " others since the last such line)");
}

}  // namespace ringreduce::net
