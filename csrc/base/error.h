// What can go wrong, as types: four failures of a group, one of its set-up, one of a call's
// arguments.
//
// A group that has failed stays failed: every later operation on it raises the same error, whose
// text names ranks, hosts and the operation (health/arbiter.cc).
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace ringreduce {

enum class Failure : uint8_t {
  kNone = 0,
  kPeerLost,  // a process is gone, or has left the group, before its part was done
  kTimeout,   // a rank did not arrive, or stopped, until the deadline
  kMismatch,  // ranks disagree about which operation this is
  kAborted,   // a rank gave up: abort(), Ctrl-C, an error of its own
  kSetup,     // the group could not be made
  kArgument,  // refused before anything was sent; the group stays usable
};

// Why a group failed, as reported by the rank that found the cause first.
struct GroupFailure {
  Failure kind = Failure::kNone;
  int culprit = 0, reporter = 0;
  std::string text;

  bool operator==(const GroupFailure&) const = default;
};

class Error : public std::runtime_error {
 public:
  Error(Failure kind, const std::string& what) : std::runtime_error(what), kind_(kind) {}
  Failure kind() const { return kind_; }

 private:
  Failure kind_;
};

// An error of the operating system, with errno's text.
[[noreturn]] void throwErrno(Failure kind, const std::string& what);

}  // namespace ringreduce
