// Calls of hosts with several ranks each: through shared memory inside each host, and over streams
// between the ranks of one place on all hosts, so that a host's line carries no byte twice.
//
// An all-reduce:
//
//     reduce-scatter   part l of the message, of as many parts as a host has ranks, is added up at
//                      the rank of place l of each host
//     ring             the ranks of place l of all hosts add up that part's sums, each host by all
//                      of its ranks at once, and a host's line carries no addend twice
//     all-gather       the parts go to the host's other ranks
//
// Order of addition.  Parts are cut as chunks are (algorithm/cut.h), for p ranks; in a host part l
// is added in the order of places l+1, ..., l (mod p).  The part is cut again for H hosts, and
// there chunk h is made of the hosts' sums in the order h+1, ..., h (mod H).  Hosts are numbered in
// the order of the ring (bootstrap/topology.h).  The other algorithms add in another order:
// results may differ from theirs in the last bits, but are the same on all ranks and in each run.
// Halves are float32 throughout, and are rounded once.  Where all-reduces are to add in the order
// of ranks (RINGREDUCE_ORDER=rank), only compressed ones go by the hierarchy.
//
// A reduce-scatter is its first half: each host adds up the parts of all ranks, those of place l at
// its own rank of place l, and the ring of a place ends at the owners.  The order of addition is
// the same: places l+1, ..., l inside a host, and then hosts h+1, ..., h.  An all-gather is the
// second half: a ring of each place, and then an all-gather inside each host for the ranks of each
// host.
//
// A compressed all-reduce has the same stages.  Sums inside the host are exact.  Between hosts one
// rank of each host codes each part, and has that part's errors; elsewhere its errors are 0.  The
// host's ranks share the results as decoded.
//
// All hosts must have the same number of ranks; otherwise the ring goes through all ranks.
//
// Failure.  The whole group's arbiter watches the waits inside the host: deadlines, Ctrl-C and the
// group's failure end them as they end waits for sockets, and an error there fails the whole group.
#pragma once

#include <memory>

#include "algorithm/cut.h"
#include "bootstrap/host_memory.h"
#include "bootstrap/topology.h"
#include "collectives/collectives.h"
#include "health/arbiter.h"
#include "transport/shm/wait.h"

namespace ringreduce {

class Hierarchy {
 public:
  // Whether there are several hosts with the same number of ranks, several each, that may share
  // memory.
  static bool fits(const Hosts& hosts, const SharedOptions& options);
  // Null where it does not fit.  The rings between hosts, and the transport's ranks, are in the
  // order of `ring`.  `local_memory` comes from shareMemory.  These, the hosts and the arbiter must
  // live as long.
  static std::unique_ptr<Hierarchy> create(const Hosts& hosts, const SharedOptions& options,
                                           const HostRing& ring, const HostMemory& local_memory,
                                           Arbiter& arbiter);
  ~Hierarchy();

  void setPatience(Patience patience);
  // Performs the call, and begins and finishes it over the streams; or returns false: it goes over
  // the streams only.  The same on all ranks.
  bool run(OverStreams& c, const CollectiveCall& call);

 private:
  class Inside;
  Hierarchy(const Hosts& hosts, const HostRing& ring, const HostMemory& local_memory,
            Arbiter& arbiter);

  // The two calls inside the host, over its output memory, and this rank's part of the message.
  struct InsideHost {
    ReduceScatter inside;
    AllGather spread;
    Span mine;
  };
  InsideHost parts(const void* input, void* output, size_t count, DType dtype, ReduceOp op) const;

  // Starts an operation over the streams, of which a ring takes so many turns with so many bytes.
  void begin(OverStreams& c, int turns, size_t bytes) const;
  // Asks `choose` with the hierarchy among the candidates; the collective asks it without.
  bool takes(const OverStreams& c, CallSize call) const;
  bool takes(const OverStreams& c, const CompressedAllReduce& call) const;
  void run(OverStreams& c, const AllReduce& call);
  void run(OverStreams& c, const CompressedAllReduce& call);
  void run(OverStreams& c, const AllGather& call);
  void run(OverStreams& c, const ReduceScatter& call);
  // The caller's ranks on the host of that position in the ring.
  const std::vector<int>& ranksAt(size_t position) const {
    return hosts_.ranksOn(hosts_in_ring_[position]);
  }

  const Hosts& hosts_;
  Arbiter& arbiter_;
  std::unique_ptr<Inside> inside_;
  const std::vector<int> hosts_in_ring_;
  std::vector<int> ring_;  // the transport's ranks of this place, host by host
  size_t here_ = 0;        // this host's position in the ring
};

}  // namespace ringreduce
