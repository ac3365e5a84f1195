// The ranks of a group between two changes of who they are: the memory and the sockets that they
// share, their states, their operations and messages.
//
// Most groups have one epoch.  A group that goes on after losses between hosts takes a new one
// after each loss (survival/survivors.h).  An epoch numbers its ranks by their positions in it
// (epoch/rank_map.h).
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/executor.h"
#include "bootstrap/host_memory.h"
#include "bootstrap/options.h"
#include "bootstrap/store.h"
#include "epoch/operation.h"
#include "epoch/rank_map.h"
#include "epoch/recorder.h"
#include "health/arbiter.h"
#include "p2p/messenger.h"

namespace ringreduce {

class Hosts;
struct HostRing;
class Network;
class Wires;

class Epoch {
 public:
  // Makes the group of the ranks of this host, if there are several hosts.
  using MakeLocal = std::function<void(int rank, HostMemory host_memory, const GroupOptions&)>;

  // Collective over options.members of a group of `group_size` ranks, in which this one is `rank`.
  // Returns when they have joined, on one host or several.  Throws Error.  The executor must
  // outlive it.
  static std::shared_ptr<Epoch> create(Store& store, int rank, int group_size,
                                       const GroupOptions& options, Executor& executor,
                                       const MakeLocal& make_local);
  // Of ranks that share memory.
  Epoch(int rank, HostMemory host_memory, const GroupOptions& options, Executor& executor);
  ~Epoch();
  Epoch(const Epoch&) = delete;
  Epoch& operator=(const Epoch&) = delete;

  // Runs the operation in this thread.  One at a time.  `recording`: null for a barrier of our own.
  void run(const Operation& operation, Nanos timeout, bool in_users_thread, Recording* recording);

  // Sends posted messages and leaves the other ranks.
  void leave(void (*poll)(), Nanos timeout);
  // After a newer epoch has taken its place on all ranks: ends without waiting for them.
  void retire();

  // Whether the group goes on in another epoch after a loss.
  bool mayBeReplaced() const { return shared.goesOn() && network; }
  PeerView& peers() const { return arbiter->peers(); }
  // The order of rings between hosts; null if all ranks share memory.
  const HostRing* ring() const;
  // The cost model of the wires between hosts.
  WireCost wireCost() const;
  // Whether collectives use tensors in place that all ranks have in shared blocks.
  bool usesTensorsInPlace() const;
  // Between hosts: asks all ranks for the progress of their GPU streams, without waiting; see
  // Control::askForProgress.  `at_once`: also if they have just been asked, and ranks with
  // nothing new do not answer again.
  void askForStreams(bool at_once);

  const int rank, size;  // positions, as are all ranks here
  const GroupOptions options;
  const RankMap ranks;  // of the group

 private:
  void note(Recording* recording) const;

  Epoch(int rank, std::unique_ptr<Network> network, Hosts hosts, HostMemory local_memory,
        const GroupOptions& options, Executor& executor);

  struct Closes {
    void operator()(Network* network) const;
  };

  const Patience users_patience_, workers_patience_;

 public:
  const SharedOptions shared;

 private:
  HostMemory host_memory_;  // of ranks that share memory: all, or this host's

 public:
  const std::unique_ptr<Hosts> hosts;      // null if all ranks share memory
  const std::unique_ptr<Network> network;  // to the other ranks; null likewise
  const std::unique_ptr<Arbiter> arbiter;
  const std::unique_ptr<Wires> wires;

 private:
  std::unique_ptr<Network, Closes> closed_first_;  // its threads use the arbiter and the wires

 public:
  const std::unique_ptr<Messenger> messenger;

 private:
  uint64_t sequence_ = 0;  // of the next operation
  std::once_flag departed_;
};

}  // namespace ringreduce
