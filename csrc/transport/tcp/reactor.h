// The thread in which a process looks after its sockets while its ranks compute: who connects,
// heartbeats, departures, messages.  Never the data of collectives: whoever waits for that moves it
// (transport/transport.h).
//
// One thread serves all groups of a process.  It starts with the first user, sleeps in epoll, and
// ends with the last; a user dropped by a callback may be the last.  A callback must not block, and
// what it throws ends the process's trust in that socket alone: it is logged, and the socket is no
// longer watched.
//
// In a forked child the parent's reactor does nothing whatever it is asked, and its callbacks are
// never called.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "base/clock.h"

namespace ringreduce::net {

class Reactor {
 public:
  using Ready = std::function<void(uint32_t events)>;  // of EPOLLIN, EPOLLOUT, EPOLLERR, EPOLLHUP
  using Timer = uint64_t;                              // 0 is none

  // This process's; made if there is none.  After a fork the child gets one of its own.
  static std::shared_ptr<Reactor> shared();
  virtual ~Reactor() = default;

  // From any thread.  `ready` is called in the reactor's.  A descriptor must be forgotten before it
  // is closed.
  virtual void watch(int fd, uint32_t events, Ready ready) = 0;
  virtual void change(int fd, uint32_t events) = 0;
  // When it returns `ready` is not running and will not be called again, unless this is called by
  // a callback: then by none but the one that runs.
  virtual void forget(int fd) = 0;

  // Calls `then` once, at `when` or a little later.
  virtual Timer at(Nanos when, std::function<void()> then) = 0;
  virtual void cancel(Timer timer) = 0;  // as forget
  // Calls `then` soon, in the order of these calls; also if the last user is gone by then.
  virtual void soon(std::function<void()> then) = 0;
  // Returns once `then` has run in the reactor's thread (at once in that thread).  Throws what it
  // throws.
  virtual void run(const std::function<void()>& then) = 0;
  // Whether the caller is the reactor's thread, where nothing may wait.
  virtual bool isItsThread() const = 0;
};

}  // namespace ringreduce::net
