// The all-reduce of hosts that hold several ranks each: added up inside each host through shared
// memory, then between the hosts, then spread inside each host.
//
//     reduce-scatter   part l of the message, of as many parts as a host has ranks, is added up at
//                      the rank of place l of each host
//     ring             the ranks of place l of all hosts add up that part's sums, each host by all
//                      of its ranks at once, and a host's wire carries no addend twice
//     all-gather       the parts go to the host's other ranks
//
// Order of addition.  Parts are cut as chunks are (algorithm/cut.h), for p ranks; in a host part l
// is added in the order of places l+1, ..., l (mod p).  The part is cut again for H hosts, and
// there chunk h is made of the hosts' sums in the order h+1, ..., h (mod H): hosts are numbered as
// they stand in the ring (bootstrap/topology.h).  That is another order than the other
// algorithms': results may differ from theirs in the last bits, but are the same on all ranks, and
// each time.  Halves stay float32 through all of it, and are rounded once.
//
// A compressed all-reduce goes the same way: sums inside the host are exact, only what goes between
// hosts is coded, by one rank of each host for each part, which has that part's errors; elsewhere a
// rank has none.  The results go round the host as they were decoded.
//
// It is for hosts that hold as many ranks as each other; elsewhere the ring goes through all ranks.
//
// Failure.  Waits inside the host are watched by the whole group's arbiter: deadlines, Ctrl-C and
// failures end them as they end those for sockets, and errors there fail the whole group.
#pragma once

#include <memory>

#include "bootstrap/membership.h"
#include "bootstrap/topology.h"
#include "collectives/collectives.h"
#include "health/arbiter.h"
#include "transport/shm/wait.h"

namespace ringreduce {

class Transport;

class Hierarchy {
 public:
  // Whether hosts are several, and even, and hold several ranks each, which may share memory.
  static bool fits(const Hosts& hosts, const SharedOptions& options);
  // Null where they are not.  The rings between hosts, and the transport's ranks, are in the order
  // of `ring`.  `neighbours`: what shareMemory gave.  These, the hosts and the arbiter must live as
  // long.
  static std::unique_ptr<Hierarchy> create(const Hosts& hosts, const SharedOptions& options,
                                           const HostRing& ring, const Membership& neighbours,
                                           Arbiter& arbiter);
  ~Hierarchy();

  void setPatience(Patience patience);
  // Whether this is its to do.  The same on all ranks.
  bool takes(const Transport& transport, const AllReduce& call) const;
  // Begins and finishes the transport's operation.
  void allReduce(Transport& transport, const AllReduce& call);
  bool takes(const Transport& transport, const CompressedAllReduce& call) const;
  void compressedAllReduce(Transport& transport, const CompressedAllReduce& call);
  size_t stagingBytes() const;

 private:
  class Neighbours;
  Hierarchy(const Hosts& hosts, const HostRing& ring, const Membership& neighbours,
            Arbiter& arbiter);

  const Hosts& hosts_;
  Arbiter& arbiter_;
  std::unique_ptr<Neighbours> neighbours_;
  std::vector<int>
      ring_;  // the ranks of this one's place, host by host, as the transport knows them
};

}  // namespace ringreduce
