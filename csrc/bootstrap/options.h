// The options of a group, with their defaults and sources.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "algorithm/choose.h"
#include "algorithm/cut.h"
#include "base/clock.h"
#include "base/error.h"

namespace ringreduce {

// What a lost rank means for a group: it fails, or goes on without it.
enum class OnLoss : uint8_t { kError, kContinue };

// Rank 0's values hold for all; of slot_bytes and slots between hosts each host's lowest rank's
// (HostLinks::localOptions), and `encrypted` must be the same there.  On one host its invitation
// carries them (Meeting::publish and join, in rendezvous.cc); between hosts each rank tells its own
// (HostLinks::open), and all take rank 0's (HostLinks::readOptions).
struct SharedOptions {
  Algorithm algorithm = Algorithm::kAuto;  // RINGREDUCE_ALGORITHM
  size_t slot_bytes = 128 << 10;           // RINGREDUCE_SLOT_BYTES
  int slots = 4;                           // RINGREDUCE_SLOTS
  bool encrypted = false;                  // RINGREDUCE_TLS=1, of data on sockets
  bool sockets = false;                    // RINGREDUCE_WIRE=tcp: no shared memory for collectives
  OnLoss on_loss = OnLoss::kError;         // RINGREDUCE_ON_LOSS
  int min_ranks = 1;                       // RINGREDUCE_MIN_RANKS: with fewer it fails all the same
  AddOrder order = AddOrder::kRing;        // RINGREDUCE_ORDER

  bool goesOn() const { return on_loss == OnLoss::kContinue; }
  // Reads the environment; defaults depend on how many ranks share this process's cores.
  static SharedOptions fromEnvironment(int world_size);
  // Throws Error(kArgument) for invalid values.
  void validate(int world_size = 1) const;
  std::string toText() const;
  static SharedOptions fromText(const std::string& text);
};

class Attempt;  // bootstrap/attempt.h

struct GroupOptions {
  std::string name;                    // for messages: "group 'default_pg'"
  std::vector<int> global_ranks = {};  // the ranks' numbers in messages; empty: as they are here
  Nanos timeout = 1800 * kSecond;      // of an operation, and of making the group
  Nanos stall = 10 * kSecond;          // RINGREDUCE_STALL_SECONDS: a wait this long is logged

  std::optional<SharedOptions> shared = std::nullopt;  // rank 0's; unset: from the next
  // Null: from the environment.  Called once other ranks can be told of its error.
  std::function<SharedOptions(int world_size)> choose_shared = nullptr;
  // An error in this rank's own settings; thrown once the other ranks can be told.
  std::optional<Error> refusal = std::nullopt;

  // The launcher and its name of the job, where it has one that all ranks of a job share.  A rank
  // of another job of that launcher is refused.
  std::string launcher = "", job = "";
  std::string program = "";  // of this rank; a difference is logged

  // After a reconfigure: the ranks' numbers when their processes made the group, for messages.
  std::vector<int> started_as = {};

  int of_ranks = 0;       // of how many these are some; 0: they are all
  bool together = false;  // all ranks are known to share a host: sockets are not for them

  // Those of the caller's ranks that take part, ascending; empty: all.
  std::vector<int> members = {};

  // Tells the group that is made from all others, also of the same name (Rendezvous::id).
  std::string meeting = "";

  std::string place = "";       // what its keys in the store begin with
  std::string store_host = "";  // where the store is, by name or number, if that is known

  std::shared_ptr<Attempt> attempt = nullptr;  // null: nothing outside ends it

  bool choosesShared() const { return shared || choose_shared; }
  // `shared`, or the result of choose_shared, or the environment's.
  SharedOptions chosenShared(int world_size) const;

  // A rank of this group as messages name it.
  int shownAs(int rank) const {
    return global_ranks.empty() ? rank : global_ranks[static_cast<size_t>(rank)];
  }
  std::vector<int> shownAs(std::vector<int> ranks) const {
    for (int& rank : ranks) rank = shownAs(rank);
    return ranks;
  }
  int startedAs(int rank) const {
    return started_as.empty() ? shownAs(rank) : started_as[static_cast<size_t>(rank)];
  }
  // "1", or "1 (started as 2)" after a reconfigure that gave the rank another number.
  std::string shown(int rank) const;
  std::string rankList(const std::vector<int>& ranks) const;  // "ranks 0 and 1 (started as 2)"
  // The options of a group of some of the ranks.
  GroupOptions ofRanks(const std::vector<int>& ranks) const;
  // The same for the operations of a larger group in which these take part.
  GroupOptions ofMembers(const std::vector<int>& ranks, int size) const;

  // Called now and then by waits in a user's thread; throws to end them (Ctrl-C).  May be null.
  void (*interrupt)() = nullptr;
  // Whether Ctrl-C came after that time and was not handled: a user may wait in torch's own code
  // for an operation of the worker, which then ends it.  May be null.
  bool (*interrupted)(Nanos since) = nullptr;
};

// RINGREDUCE_WIRE=tcp: whether ranks of one host use sockets too.  Rank 0's setting holds for all.
bool forcesSockets();

// Processor cores that this process may run on.
int coresAvailable();

}  // namespace ringreduce
