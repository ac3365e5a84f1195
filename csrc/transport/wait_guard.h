// Checks during a wait for another rank: the state of ranks, and a WaitGuard, which the
// group implements (health/arbiter.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/op_signature.h"

namespace ringreduce {

// ---- the state of ranks

// Declared by the rank itself.
enum class Declared : uint32_t {
  kHere,
  kLeaving,  // it calls no more collectives and receives no more messages, but still sends some
  kGone,     // it has left
};

// Observed by other ranks.
enum class Observed : uint8_t {
  kHere,
  kStopped,      // its process was stopped (SIGSTOP, a debugger) when it was last looked at
  kEnded,        // its process ended
  kUnreachable,  // no data comes from it any more
};

// The state of one rank as another one knows it.
struct PeerState {
  Declared declared = Declared::kHere;
  Observed observed = Observed::kHere;
  bool drained = false;  // all bytes that it sent have arrived here

  bool isLost() const { return observed >= Observed::kEnded; }
  bool isHere() const { return !isLost() && declared == Declared::kHere; }
  bool mayStillSend() const { return !drained && observed != Observed::kUnreachable; }
  // It takes part in nothing any more, and all its bytes are here.
  bool isGone() const { return (isLost() || declared == Declared::kGone) && !mayStillSend(); }

  bool operator==(const PeerState&) const = default;
};

// Why a rank is lost, as text after "is lost: ".
inline constexpr char kProcessEnded[] = "its process ended";
inline constexpr char kProcessEndedOrReplaced[] = "its process ended or called exec";
inline constexpr char kProcessReplaced[] = "its process called exec (or closed its descriptors)";
inline constexpr char kDidNotAnswer[] = "its process did not answer in time";

// ---- the guard

// A non-owning reference to a callable that says whether a wait is over.
class Ready {
 public:
  template <class F>
  Ready(F& f) : object_(&f), call_([](void* o) { return (*static_cast<F*>(o))(); }) {}
  bool operator()() const { return call_(object_); }

 private:
  void* object_;
  bool (*call_)(void*);
};

// Bounds how late a lost rank, a deadline or Ctrl-C is noticed.
inline constexpr Nanos kLongestSleep = 20 * kMillisecond;

// How long to spin, and then to yield the core, before sleeping.  Spinning reacts fastest; yielding
// lets another rank on the same core run, and costs little if there is none.
struct Patience {
  Nanos spin = 0;
  Nanos yield = 0;
  Nanos sleep = kLongestSleep;  // at a time
};

class WaitGuard {
 public:
  virtual ~WaitGuard() = default;

  // Whether the group has failed.  Cheap enough for a spin loop.
  virtual bool failed() const = 0;

  // Called every kLongestSleep or so by a wait for `rank`.  Throws if the group has failed, the
  // deadline has passed, or the rank is gone while `ready` is still false and the group does not
  // survive that.
  virtual void poll(int rank, Ready ready) = 0;

  // Called by a wait over a transport after some time without any bytes moved.  Throws if `ready`
  // is still false and any rank, not only the awaited one, was lost some time ago: the awaited rank
  // may itself wait for the lost one.
  virtual void idle(Ready ready) = 0;

  // Called at the first data of `rank` in an operation.  Throws if it announced another one.
  virtual void verify(int rank) = 0;

  // The same over a transport, with the announcement that it sent.
  virtual void verify(int rank, const Announcement& theirs) = 0;

  virtual PeerState stateOf(int rank) const = 0;

  // Whether operations go on without `rank`, in a group that survives losses: it has ended or left
  // or is left out, and this rank knows it.  Its flags are final then.
  virtual bool isAbsent(int rank) const = 0;

  // An operation needs data that an absent rank has not sent.  Throws the error of that operation;
  // the group can still be used.
  [[noreturn]] virtual void endOperation(int rank) = 0;

  // Called when no more bytes can be sent to `rank` or received from it.  Throws.
  [[noreturn]] virtual void broken(int rank, const std::string& how) = 0;

  // Called when `sender` sends `sent` elements to `receiver`, which expects `expected`.  Throws.
  [[noreturn]] virtual void disagree(int sender, int receiver, uint64_t sent,
                                     uint64_t expected) = 0;
};

// ---- ring positions
//
// Ring positions: a transport and its collectives number the ranks by their position in the ring of
// hosts (bootstrap/topology.h).  Reports of the transport are translated back to ranks.

// Each rank's position.
inline std::vector<int> positionsOf(const std::vector<int>& ranks) {
  std::vector<int> positions(ranks.size());
  for (size_t p = 0; p < ranks.size(); ++p)
    positions[static_cast<size_t>(ranks[p])] = static_cast<int>(p);
  return positions;
}

class RingPositionGuard : public WaitGuard {
 public:
  RingPositionGuard(WaitGuard& guard, std::vector<int> ranks)
      : guard_(guard), ranks_(std::move(ranks)) {}

  bool failed() const override { return guard_.failed(); }
  void poll(int position, Ready ready) override { guard_.poll(rankAt(position), ready); }
  void idle(Ready ready) override { guard_.idle(ready); }
  void verify(int position) override { guard_.verify(rankAt(position)); }
  void verify(int position, const Announcement& theirs) override {
    guard_.verify(rankAt(position), theirs);
  }
  PeerState stateOf(int position) const override { return guard_.stateOf(rankAt(position)); }
  bool isAbsent(int position) const override { return guard_.isAbsent(rankAt(position)); }
  void endOperation(int position) override { guard_.endOperation(rankAt(position)); }
  void broken(int position, const std::string& how) override {
    guard_.broken(rankAt(position), how);
  }
  void disagree(int sender, int receiver, uint64_t sent, uint64_t expected) override {
    guard_.disagree(rankAt(sender), rankAt(receiver), sent, expected);
  }

 protected:
  int size() const { return static_cast<int>(ranks_.size()); }
  int rankAt(int position) const { return ranks_[static_cast<size_t>(position)]; }

 private:
  WaitGuard& guard_;
  const std::vector<int> ranks_;
};

}  // namespace ringreduce
