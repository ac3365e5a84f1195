// The thread that serves a process's sockets while its ranks compute: new connections, heartbeats,
// departures, messages.  It never moves the data of collectives; the thread that waits for them
// does (transport/tcp/tcp_transport.h).
//
// One thread serves all groups of a process.  It starts with the first user, sleeps in epoll, and
// ends with the last user, which a callback may release.  A callback must not block.  If it throws,
// the error is logged and its socket is no longer watched.
//
// In a forked child the parent's reactor ignores all calls and never calls back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/clock.h"

namespace ringreduce::net {

class Reactor {
 public:
  using Ready = std::function<void(uint32_t events)>;  // of EPOLLIN, EPOLLOUT, EPOLLERR, EPOLLHUP
  using Timer = uint64_t;                              // 0 is none

  // This process's reactor, created if there is none.  After a fork the child gets its own.
  static std::shared_ptr<Reactor> shared();
  virtual ~Reactor() = default;

  // All functions may be called from any thread; callbacks run in the reactor's thread.

  // Forget a descriptor before you close it.
  virtual void watch(int fd, uint32_t events, Ready ready) = 0;
  virtual void change(int fd, uint32_t events) = 0;
  // After it returns, the callback does not run and will not run again.  Exception: a callback that
  // calls this finishes first.
  virtual void forget(int fd) = 0;

  // Calls `then` once, at `when` or a little later.
  virtual Timer at(Nanos when, std::function<void()> then) = 0;
  virtual void cancel(Timer timer) = 0;  // as forget
  // Calls `then` soon, in the order of these calls, even if the last user is gone by then.
  virtual void soon(std::function<void()> then) = 0;
  // Runs `then` in the reactor's thread and returns when it has run.  Throws what it throws.
  virtual void run(const std::function<void()>& then) = 0;
  // Whether the caller is the reactor's thread, which must not block.
  virtual bool isItsThread() const = 0;
};

// Logs events that strangers can cause as often as they like: at most one line per interval, with a
// count.  Used in the reactor's thread, except for constructor and destructor.
class RateLimitedLog {
 public:
  explicit RateLimitedLog(std::shared_ptr<Reactor> reactor, Nanos every = 60 * kSecond);
  ~RateLimitedLog();
  RateLimitedLog(const RateLimitedLog&) = delete;
  RateLimitedLog& operator=(const RateLimitedLog&) = delete;

  // Logs the first event at once; at the end of the interval, the latest one and a count.
  void add(const std::string& text);

 private:
  void report();

  const std::shared_ptr<Reactor> reactor_;
  const Nanos every_;
  const int generation_;
  Reactor::Timer timer_ = 0;  // runs during an interval
  size_t count_ = 0;
  std::string latest_;
};

}  // namespace ringreduce::net
