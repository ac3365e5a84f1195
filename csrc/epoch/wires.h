// The wires of a group's operations: shared memory, or sockets with a hierarchy above them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bootstrap/host_memory.h"
#include "epoch/network.h"
#include "epoch/operation.h"
#include "health/arbiter.h"

namespace ringreduce {

// Operations of one thread at a time.
class Wires {
 public:
  virtual ~Wires() = default;
  // Before the operation is announced.
  virtual void prepare(const Operation&, uint64_t /*sequence*/) {}
  virtual void setPatience(Patience patience) = 0;
  // `announced`: as the arbiter has announced it.
  virtual void run(const Operation& operation, const Announcement& announced) = 0;
  // How the last operation ran.
  virtual Way way() = 0;
  virtual bool usesTensorsInPlace() const { return false; }
  virtual size_t stagingBytes() const = 0;
  virtual std::vector<std::string> routes() const { return {}; }
  virtual uint64_t bytesSent() const { return 0; }
  virtual std::vector<Line> lines() const { return {}; }
  // What is known of the wire now.  From any thread.
  virtual WireCost cost() const { return {}; }
  // There will be no more operations: releases sockets and memory.
  virtual void close() {}
};

// For ranks that share memory.  Both must outlive it.
std::unique_ptr<Wires> wiresInMemory(int rank, const HostMemory& host_memory, Arbiter& arbiter);
// For ranks on several hosts; `local_memory`: of the ranks of this host, if they share it.  All of
// these must outlive it.  The network reports to the arbiter from now on.
std::unique_ptr<Wires> wiresBetween(Network& network, const Hosts& hosts,
                                    const SharedOptions& shared, const HostMemory& local_memory,
                                    Arbiter& arbiter);

}  // namespace ringreduce
