// The sends and receives of one rank: the threads that move them, and the errors that end them.
//
// The engine (p2p/engine.h) matches messages and copies bytes, and never waits.  The messenger has
// the threads.  A thread that waits for a message drives the engine: it spins, then yields, then
// sleeps until a peer wakes it.  One thread drives at a time; the others wait for it.  If
// messages are in flight and no thread waits, a thread of this group drives, so that they arrive
// while the rank computes.  Collectives have their own thread and wake word: neither kind waits for
// the other.
//
// A message has no deadline until a thread waits for it: a server may keep receives open for hours.
// A process that ended, a deadline and messages that do not match fail the group
// (health/arbiter.h). A rank that left normally ends only the messages that it could have taken
// part in.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/executor.h"
#include "bootstrap/host_memory.h"
#include "bootstrap/options.h"
#include "health/arbiter.h"
#include "p2p/engine.h"
#include "transport/shm/wait.h"

namespace ringreduce {

// A posted message, to wait for.
class Delivery final : public OperationHandle, public Transfer {
 public:
  Delivery(Message m, std::weak_ptr<void> o, const GroupOptions& group)
      : Transfer(std::move(m)), owner(std::move(o)), members_(group.members) {}

  // The sender of a receive that is done, as callers count (GroupOptions::members).
  int sender() const { return members_.empty() ? source : members_[static_cast<size_t>(source)]; }

  const std::weak_ptr<void> owner;  // what the messenger belongs to
  // Since when it is waited for by a thread that cannot drive the engine; 0 if it is not.
  Nanos expected_since = 0, timeout = kNever;
  // In CLOCK_MONOTONIC: the call, and since when a thread waits for it, 0 if none does.
  Nanos called = 0, awaited = 0;
  // What of `peer_posted` and `posted` to add for CLOCK_MONOTONIC.
  Nanos ahead = 0;

 private:
  const std::vector<int> members_;
};

// Is told of each message, by one thread at a time.
class MessageObserver {
 public:
  virtual ~MessageObserver() = default;
  // A message to or from `peer` (-1: from any rank) is posted.  Returns why not sooner.
  virtual Inherited onPost(int peer, Nanos at) = 0;
  virtual void onEnd(const Delivery& delivery, Nanos at, bool failed) = 0;
};

// The channels of rank `rank` to each rank of a host: rings in the members' segments.  The host
// memory must live as long.
std::vector<Engine::Channels> messageRings(const HostMemory& host_memory, int rank);

class Messenger {
 public:
  Messenger(int rank, std::vector<Engine::Channels> channels, Arbiter& arbiter, Executor& executor,
            const GroupOptions& options, Patience patience);
  ~Messenger();  // `stop` has been called

  // Starts a send or a receive, and moves as much as possible at once.  Throws Error(kArgument) for
  // invalid arguments, and Error(kAborted) while the group is being left.
  std::shared_ptr<Delivery> post(Message message, std::weak_ptr<void> owner);

  // Keeps what owns the buffer until the message is over.
  void keep(Delivery& delivery, std::shared_ptr<void> memory);

  // Waits.  Returns false after `longest`.  The message must complete within `timeout` from now.
  // Ctrl-C aborts the group and throws.  Does not throw the message's error.
  bool await(Delivery& delivery, Nanos longest, Nanos timeout);

  // A Future of torch waits for the message: it must complete within `timeout`, and Ctrl-C ends it.
  void expect(Delivery& delivery, Nanos timeout);

  bool isIdle();  // no message waits to be sent or received

  // Before the first message.
  void setObserver(std::unique_ptr<MessageObserver> observer) { observer_ = std::move(observer); }
  // Calls `look` with each message that is not over.
  void forEachPending(const std::function<void(const Delivery&)>& look);

  // Sends posted messages to ranks that still receive, cancels all receives, and ends the thread.
  // `poll`, if not null, is called now and then and may throw: then, and after `timeout`, the sends
  // are cancelled as well.
  void stop(void (*poll)(), Nanos timeout);

 private:
  struct Driving;
  class Clock;

  // `at`: a time of CLOCK_MONOTONIC that has just been read, 0: none.
  bool pass(Nanos at = 0);
  void tellEnds(const std::vector<Engine::Handle>& over, Nanos at, bool failed);
  void finish(const std::vector<Engine::Handle>& over, std::exception_ptr error);
  void failAll(const std::exception_ptr& error);
  void fail(std::vector<Engine::Handle> some, const std::exception_ptr& error);
  void checkWait(const Delivery& delivery, Clock& clock);
  void sleep(const Delivery* waited_for);
  void checkPeers();
  bool isHopeless(const Transfer& transfer, const std::vector<PeerState>& peers) const;
  void checkExpected();
  void timedOut(const Delivery& delivery, Nanos timeout);
  void notifyUsers();
  std::string stillSending();
  void checkMismatch(const Transfer& transfer);
  void run();
  bool wantsThread() const;
  bool wantedByUsers();
  void notifyThread();
  void startThread();
  std::string describe(const Transfer& transfer) const;
  std::pair<int, std::string> missingOf(const Transfer& transfer);
  std::string missing(const Transfer& transfer);

  const int rank_, size_;
  Arbiter& arbiter_;
  Executor& executor_;
  const GroupOptions& options_;
  const Patience patience_;

  std::mutex mutex_;  // guards all below; never held during a call that may block
  Engine engine_;
  std::unique_ptr<MessageObserver> observer_;
  bool driven_ = false;  // a thread drives the engine
  std::thread::id driver_;
  int users_ = 0;  // threads in await
  bool closed_ = false, stopping_ = false, thread_asleep_ = false;
  uint64_t posts_ = 0;
  std::condition_variable changed_, for_thread_;
  std::thread thread_;
};

}  // namespace ringreduce
