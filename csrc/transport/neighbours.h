// The ranks of this host that a transport reaches through memory instead of sockets: a pipe of
// bytes to each and from each, and one doorbell for all.
//
// A transport that sleeps on sockets (transport/tcp/tcp_transport.h) uses this class, and
// transport/shm/byte_pipe.h implements it: neither knows the other.
#pragma once

#include <sys/uio.h>

#include <cstddef>

namespace ringreduce {

// Both directions between this rank and another.  Nothing here waits.
class BytePipe {
 public:
  virtual ~BytePipe() = default;
  // How many bytes of these pieces the pipe took, or gave; 0: none for now.
  virtual size_t send(const iovec* pieces, size_t count) = 0;
  virtual size_t receive(const iovec* pieces, size_t count) = 0;
};

class Neighbours {
 public:
  virtual ~Neighbours() = default;

  // Null for a rank that is reached through sockets, and for this one.
  virtual BytePipe* pipe(int rank) = 0;
  // An eventfd.  The others ring it when they have moved bytes while this rank listens.  A rank
  // that listens looks at its pipes once more before it sleeps.
  virtual int doorbell() const = 0;
  virtual void listen(bool listens) = 0;
};

}  // namespace ringreduce
