// Connections made in the background, several at a time: dialling blocks, and neither the reactor's
// thread nor whoever waits for data must.
//
// There are threads while there is something to dial, and no more than a bound.  A connection that
// is long in the making (its rank is stopped in a debugger) gives its thread to those that wait for
// one, and is tried again after them.
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

// Makes a proven, non-blocking connection to a rank: number `lane` of those of one kind to it, or 0
// where there is but one.  May block; calls `turn` every few milliseconds, which throws once nobody
// wants the connection any more, and must be let through; throws.
using Dial = std::function<Socket(int to, int lane, const std::function<void()>& turn)>;

// A connection cannot be made, and that is this process's own fault, whomever it calls.
class OwnTrouble final : public Error {
 public:
  explicit OwnTrouble(const std::string& text) : Error(Failure::kSetup, text) {}
};

// Why there is no connection; of no text where there is one.
struct NotMade {
  std::string why;
  bool own = false;  // OwnTrouble
};

class Connector {
 public:
  // Takes what became of it: a connection, or why there is none.  Called in a thread of the
  // dialler's, or by call() itself where no thread can be started.
  using Taken = std::function<void(Socket socket, const NotMade& error)>;

  // Gives a connection up that takes longer than `longest` to make.
  explicit Connector(Dial dial, Nanos longest = kNever);
  ~Connector() { stop(); }
  Connector(const Connector&) = delete;
  Connector& operator=(const Connector&) = delete;

  // `taken` is called once, unless this dialler has been stopped by then.  From any thread.
  void call(int to, int lane, Taken taken);
  // Gives up what goes on, and waits for it.
  void stop();

  static constexpr int kMostThreads = 16;

 private:
  struct Call {
    int to, lane;
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
  // Never freed in a forked child, where there are no such threads.
  std::vector<std::thread>* threads_ = new std::vector<std::thread>;
};

}  // namespace ringreduce::net
