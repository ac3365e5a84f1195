// What can go wrong, as types: four failures of a group, one of its set-up, one of a call's
// arguments.
//
// A group that has failed stays failed: every later operation on it raises the same error.  The
// text of each names ranks, hosts and the operation, and is made where these are known
// (health/arbiter.cc).
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
