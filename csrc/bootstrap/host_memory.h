// The ranks of one host hand each other their shared memory and descriptors of their processes.
//
// The host's lowest rank leads.  It listens on an abstract Unix socket whose name and secret all
// ranks have from the rendezvous.  Every other rank connects, proves its user id and the secret,
// and sends its memory.  Once all are there, the leader sends the table of all members.  Each rank
// maps the memory and says so.  The leader's last word then starts the group on all ranks, or ends
// it on all ranks with the first error that any of them met.
#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/fd.h"
#include "bootstrap/attempt.h"
#include "bootstrap/options.h"
#include "bootstrap/process.h"
#include "bootstrap/store.h"
#include "bootstrap/unix_socket.h"
#include "transport/shm/page.h"
#include "transport/shm/segment.h"

namespace ringreduce {

struct Member {
  int pid = 0;  // in its own PID namespace
  std::string host;
  std::shared_ptr<Segment> segment;
  ProcessFds process;
  std::shared_ptr<Fd> doorbell = {};  // an eventfd (transport/neighbours.h), if there are pipes
};

struct HostMemory {
  SharedOptions options;
  std::vector<Member> members;  // by rank
};

// A rank's shared memory: its page, the exchange's slots, the inbound link's slots, a box and a
// ring for each rank's messages, and with `pipes` as many again for pipes
// (transport/shm/byte_pipe.h). Pages that nothing was written to cost nothing.
struct Layout {
  explicit Layout(const SharedOptions& options, int world_size, bool pipes = false);
  size_t exchange, link, boxes, rings, pipe_boxes, pipe_rings, bytes;  // offsets, and the whole
};

// A rank's segment, and the page at its start.
inline std::byte* memoryOf(const HostMemory& host_memory, int rank) {
  return host_memory.members[static_cast<size_t>(rank)].segment->data();
}
inline RankPage& pageOf(const HostMemory& host_memory, int rank) {
  return *reinterpret_cast<RankPage*>(memoryOf(host_memory, rank));
}

// Why making a group failed, as all ranks report it.
struct Reason {
  Failure kind;
  std::string text;
};
// `who` names this rank, for errors that do not.
Reason reasonOf(const std::exception_ptr& error, const std::string& who);
// The kind of a failure that another rank told; kSetup if it told none.
Failure kindOf(const Fields& fields);
// In the store, for ranks that have confirmed the table of that nonce.
std::string reasonKey(const std::string& nonce);
std::string encode(const Reason& reason, int culprit);
// Stores the reason under that key unless another rank stored one first.  Returns the stored one:
// the error of all ranks.
std::string storeReason(Store& store, const std::string& key, const std::string& reason);
// A rank that ends with the reason says so.  Rank 0, whose process may hold the store, stays until
// all others have, or none has for limits::kReadersTime.  The store's errors are logged.
void confirmReason(Store& store, const std::string& nonce, int rank, const GroupOptions& options);
void awaitReaders(Store& store, const std::string& nonce, int size, const GroupOptions& options);

// The knowledge of a rank about its host's ranks before the exchange.
struct LocalRanks {
  int rank = 0, size = 1;      // among the host's ranks
  std::string socket, secret;  // the leader's
  SharedOptions shared;
  GroupOptions options;   // how messages name the ranks
  Fields entry = {};      // sent when this rank connects
  bool pipes = false;     // they get each other's doorbells
  bool optional = false;  // if one cannot share memory, MemoryRefused tells all of them
};

// Ranks that can do without share no memory.  Thrown on all of them or on none.
struct MemoryRefused final : Error {
  using Error::Error;
};

// The lowest rank.
class HostLeader {
 public:
  // Called for each rank that connects, with its entry; throws if it does not belong here.
  using Check = std::function<void(int rank, const Fields& entry)>;
  // Listens from now on.
  explicit HostLeader(LocalRanks ranks, Check check = nullptr);
  // Called while the leader waits for the ranks that did not do `what` yet.
  using Poll = std::function<void(const std::vector<int>& missing, const char* what)>;
  // `all_there` is called once, when all ranks have connected.  After an exception call `fail`.
  HostMemory run(const Poll& poll, const std::function<void()>& all_there);
  // Tells the ranks that have connected that the rendezvous goes on without this exchange.
  void sendAway();
  void fail(const Reason& reason);
  // The same, for ranks that are yet to come as well.
  void failAll(const Reason& reason, const Poll& poll);

 private:
  struct Caller {
    Fd socket;
    Peer peer;
    int pid = 0;                                       // in its own PID namespace
    int rank = -1;                                     // not known yet
    bool proven = false, ready = false, told = false;  // told: of a failure
  };

  void step(const Poll& poll, const char* what);
  void waitForCallers();
  void acceptAll();
  bool proves(Caller& caller, const Fields& fields);
  void tellFailure(Caller& caller, const Reason& reason);
  bool receiveFrom(Caller& caller);
  void admit(Caller& caller, const Fields& fields, std::vector<Fd> fds);
  void tell(const Caller& caller, const Fields& fields, const std::vector<int>& fds = {});
  void sendTable(const Caller& caller);
  std::vector<int> missing() const;
  std::string nameOf(int64_t rank) const;

  const LocalRanks ranks_;
  const Check check_;
  const AttemptClock clock_{ranks_.options, 0};  // for its pauses: `poll` ends the waits
  HostMemory table_;
  Fd listener_;
  std::vector<Caller> callers_;
  std::vector<bool> joined_;  // by rank
  int strangers_ = 0;
};

// The leader closed its connection and sent no reason.
struct LeaderClosed {};

// Throws Error(kSetup) if the leader runs as another user: it would refuse this rank in silence.
void checkUser(const Fd& socket, const LocalRanks& ranks);

// Any other rank.  `socket` is connected to the leader.  `poll` is called now and then and may
// throw; `all_there` once, when all ranks have connected.  Returns none if the leader sent this
// rank away.  Throws LeaderClosed, or Error.
std::optional<HostMemory> joinLeader(Fd socket, const LocalRanks& ranks,
                                     const std::function<void()>& poll,
                                     const std::function<void()>& all_there);

// The whole exchange, for ranks that know that they share a host.  Collective on the host.  `poll`
// is called now and then with a rank that is waited for; it throws at the deadline.
HostMemory shareMemory(const LocalRanks& ranks, const std::function<void(int late)>& poll);

}  // namespace ringreduce
