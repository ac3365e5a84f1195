// Sends and receives of one rank: who moves them on, and what ends them.
//
// The engine (p2p/engine.h) knows which bytes go where and waits for nothing.  Here are the
// threads: whoever waits for a message drives the engine, spinning, then yielding, then asleep on a
// bell that peers ring; one at a time, the others wait for it.  If messages are under way and
// nobody waits, a thread of this group does the same, so that they arrive while the rank computes.
// Collectives have a thread and a bell of their own: neither kind ever waits for the other.
//
// A message has no deadline until somebody waits for it: a server may keep receives open for hours.
// A process that died, a deadline and messages that do not fit end the group (health/session.h).  A
// rank that has left normally ends only what it could still have been part of.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/executor.h"
#include "bootstrap/options.h"
#include "health/session.h"
#include "p2p/engine.h"
#include "transport/shm/wait.h"

namespace ringreduce {

// A message's end.
class Delivery final : public Ticket, public Transfer {
 public:
  explicit Delivery(Message m) : Transfer(std::move(m)) {}

  // Since when somebody waits for it where nobody drives the engine; 0 if nobody does.
  Nanos expected_since = 0, timeout = kNever;
};

class Messenger {
 public:
  Messenger(int rank, std::vector<Engine::Wire> wires, Session& session, Executor& executor,
            const GroupOptions& options, Patience patience);
  ~Messenger();  // `stop` has been called

  // Starts a send or a receive; what can be moved at once is.  Throws Error(kArgument) for what
  // cannot be, and Error(kAborted) once the group is being left.
  std::shared_ptr<Delivery> post(Message message);

  // Waits; false if `longest` goes by first.  The deadline of the group is `timeout` from now.
  // Throws what Ctrl-C throws, after the group has been aborted; does not throw the message's
  // error.
  bool await(Delivery& delivery, Nanos longest, Nanos timeout);

  // From now on it is waited for elsewhere: `timeout` from now it must be over, and Ctrl-C ends it.
  void expect(Delivery& delivery, Nanos timeout);

  // Sends what is still to be sent to ranks that receive it, gives up all receives, and ends the
  // thread.  `turn`, if not null, is called now and then and may throw: then all is given up, as it
  // is after `timeout`.
  void stop(void (*turn)(), Nanos timeout);

 private:
  struct Driving;
  class Clock;

  bool pass();
  void finish(const std::vector<Engine::Handle>& over, std::exception_ptr error);
  void failAll(const std::exception_ptr& error);
  void fail(std::vector<Engine::Handle> some, const std::exception_ptr& error);
  void lookAfter(const Delivery& delivery, Clock& clock);
  void sleep(const Delivery* waited_for);
  void lookAfterPeers();
  void lookAfterExpected();
  void timedOut(const Delivery& delivery, Nanos timeout);
  void tellUsers();
  std::string stillSending();
  void checkMismatch(const Transfer& transfer);
  void run();
  bool wantsThread() const;
  bool wantedByUsers();
  void callThread();
  void startThread();
  std::string describe(const Transfer& transfer) const;
  std::string missing(const Transfer& transfer);
  std::vector<int> others() const;

  const int rank_, size_;
  Session& session_;
  Executor& executor_;
  const GroupOptions& options_;
  const Patience patience_;

  std::mutex mutex_;  // of all below; never held while anything else is called that may block
  Engine engine_;
  bool driven_ = false;  // somebody drives the engine
  std::thread::id driver_;
  int users_ = 0;  // threads in await
  bool closed_ = false, stopping_ = false, thread_asleep_ = false;
  uint64_t posts_ = 0;
  std::condition_variable changed_, for_thread_;
  std::thread thread_;
};

}  // namespace ringreduce
