// Makes connections in the background, several at a time: dialling blocks, and neither the
// reactor's thread nor a thread that waits for data may block.
//
// Threads exist while there is something to dial, up to a bound.  A connection that takes long (its
// rank is stopped in a debugger) yields its thread to waiting calls, and is tried again after them.
#pragma once

#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/fd.h"
#include "transport/tcp/socket.h"

namespace ringreduce::net {

// Makes an authenticated, non-blocking connection to a rank: the one with this number among those
// for the same purpose.  May block.  Calls `poll` every few milliseconds and passes on its
// exception, which means that the connection is not needed any more.  Throws.
using Dial = std::function<Socket(int to, int number, const std::function<void()>& poll)>;

// This process cannot make any connection, whichever rank it dials.
class OwnTrouble final : public Error {
 public:
  explicit OwnTrouble(const std::string& text) : Error(Failure::kSetup, text) {}
};

// Why there is no connection; `why` is empty if there is one.
struct NotMade {
  std::string why;
  bool own = false;  // OwnTrouble
};

class Connector {
 public:
  // Takes the connection, or the reason why there is none.  Called in a thread of the connector, or
  // by call() if no thread can be started.
  using Taken = std::function<void(Socket socket, const NotMade& error)>;

  // A connection that takes longer than `longest` to make is given up.
  explicit Connector(Dial dial, Nanos longest = kNever);
  ~Connector() { stop(); }
  Connector(const Connector&) = delete;
  Connector& operator=(const Connector&) = delete;

  // `taken` is called once, unless this connector is stopped before.  From any thread.
  void call(int to, int number, Taken taken);
  // Gives up all calls and joins the threads.
  void stop();

  static constexpr int kMostThreads = 16;

 private:
  struct Call {
    int to, number;
    Taken taken;
    Nanos until = 0;  // 0: not begun
  };
  void run();
  void joinEnded();
  bool isStopping();
  bool othersWait();
  Socket dial(Call& call);

  const Dial dial_;
  const Nanos longest_;
  const int generation_ = forkGeneration();
  std::mutex mutex_;  // of all below
  std::deque<Call> calls_;
  bool stopping_ = false;
  int alive_ = 0;
  std::vector<std::thread::id> ended_;
  // Never freed in a forked child, where these threads do not exist.
  std::vector<std::thread>* threads_ = new std::vector<std::thread>;
};

}  // namespace ringreduce::net
