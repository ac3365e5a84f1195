// A thread that answers other ranks, whatever the program does, as long as its process runs.
//
// A process that does not run cannot always be seen or killed: its cgroup is frozen, or it is in
// another PID namespace.  So in shared memory each rank of a group that survives losses has this
// thread.  A rank whose thread does not answer at a deadline is left out (transport/shm/page.h).
#pragma once

#include <atomic>
#include <thread>

#include "base/fd.h"
#include "transport/shm/page.h"

namespace ringreduce {

class Pulse {
 public:
  explicit Pulse(RankPage& page);  // of this rank
  ~Pulse();

 private:
  void run();

  RankPage& page_;
  const int generation_ = forkGeneration();
  std::atomic<bool> stopping_ = false;
  std::thread* thread_ = nullptr;  // never deleted in a child, where there is no such thread
};

}  // namespace ringreduce
