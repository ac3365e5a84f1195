// The Communicator of ranks that share memory: pages and slots in the members' segments.
#pragma once

#include "bootstrap/membership.h"
#include "collectives/communicator.h"
#include "transport/shm/exchange.h"
#include "transport/shm/shm_link.h"
#include "transport/shm/wait.h"

namespace ringreduce {

// Calls of one thread at a time.  The membership must live as long.
class SharedMemory {
 public:
  SharedMemory(int rank, const Membership& membership, WaitGuard& watch);
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  Communicator& communicator() { return communicator_; }
  void setPatience(Patience patience) { waiter_.setPatience(patience); }
  size_t bytes() const { return bytes_; }

 private:
  const int size_;
  const size_t bytes_;
  Waiter waiter_;
  Exchange exchange_;
  ShmSendLink to_next_;
  ShmRecvLink from_prev_;
  Communicator communicator_;
};

}  // namespace ringreduce
